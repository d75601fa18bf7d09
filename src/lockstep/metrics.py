"""The directory of a run: what was set, what was measured, and the curves. The root writes it."""

from __future__ import annotations

import csv
import json
import platform
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from lockstep.data.load import on_all
from lockstep.errors import SettingsError
from lockstep.world import World

EPOCH = "epoch"


class RunDirectory:
    """A new directory for this run, `PARENT/NAME-TIME`; an older one is never written to.

    It holds settings.json, at once; metrics.jsonl, a line a record, each on disk when it is
    recorded; and in the end results.csv, a row an epoch, and curves.png. Making it is Collective.

    Args:
        world: the ranks; on all but the root the methods do nothing.
        parent: where to make it; made too if it is missing.
        name: of the job.
        settings: a dataclass.
        facts: what else belongs into settings.json.

    Attributes:
        path: the directory, the same on all ranks.

    Raises:
        SettingsError: on all ranks, if the root cannot make it.
    """

    def __init__(
        self, world: World, parent: Path, name: str, settings: Any, facts: Mapping[str, Any]
    ) -> None:
        self._root = world.rank == 0
        self._start = time.perf_counter()
        self._epochs: list[dict[str, Any]] = []
        made = on_all(world, lambda: _make(parent, name) if self._root else None)
        self.path: Path = world.comm.bcast(made, root=0)
        hosts = world.comm.gather(world.host, root=0)
        if self._root:
            record = {"settings": asdict(settings), **facts, **_surroundings(world, hosts or [])}
            text = json.dumps(record, indent=1, default=str)
            (self.path / "settings.json").write_text(text + "\n")

    def record(self, kind: str, **values: Any) -> None:
        """Write down what was measured. Local.

        Args:
            kind: what it is, such as "step"; values of the kind "epoch" go to results.csv too.
            values: numbers and texts, with the unit in the name where there is one.
        """
        if not self._root:
            return
        if kind == EPOCH:
            self._epochs.append(values)
        seconds = round(time.perf_counter() - self._start, 4)
        line = json.dumps({"kind": kind, "at_seconds": seconds, **values})
        with (self.path / "metrics.jsonl").open("a") as file:
            file.write(line + "\n")

    def finish(self) -> None:
        """Write results.csv and curves.png. Local."""
        if not self._root or not self._epochs:
            return
        with (self.path / "results.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(self._epochs[0]))
            writer.writeheader()
            writer.writerows(self._epochs)
        draw(self._epochs, self.path / "curves.png")


def draw(epochs: list[dict[str, Any]], path: Path) -> None:
    """Draw the losses and the accuracy by epoch. Local.

    Args:
        epochs: rows with epoch, train_loss, test_loss and accuracy (percent).
        path: of the picture, PNG.
    """
    # Without pyplot, which keeps figures and asks for a screen.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    numbers = [row["epoch"] for row in epochs]
    for name, label in (("train_loss", "training"), ("test_loss", "test")):
        left.plot(numbers, [row[name] for row in epochs], marker=".", label=label)
    left.set(xlabel="epoch", ylabel="loss")
    left.legend()
    right.plot(numbers, [row["accuracy"] for row in epochs], marker=".", color="C2")
    right.set(xlabel="epoch", ylabel="correct of the test images, %")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(path, dpi=120)


def _make(parent: Path, name: str) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for number in range(1, 1000):
            path = parent / f"{name}-{stamp}{f'-{number}' if number > 1 else ''}"
            try:
                path.mkdir()
            except FileExistsError:
                continue
            return path
    except OSError as error:
        reason = str(error)
    else:
        reason = f"{parent}/{name}-{stamp}-1 to -999 are there already"
    raise SettingsError(
        f"cannot make a directory for this run in {parent}: {reason}",
        needed="a directory that the root may write to",
        cure="name another with --run-dir",
    )


def _surroundings(world: World, hosts: list[str]) -> dict[str, Any]:
    from mpi4py import MPI

    return {
        "command": sys.argv,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "ranks": world.size,
        "nodes": world.nodes,
        "hosts": hosts,
        "threads_a_rank": torch.get_num_threads(),
        "git": git_id(Path(sys.argv[0]).resolve().parent),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "mpi": MPI.Get_library_version().splitlines()[0].strip("\0 "),
        },
    }


def git_id(start: Path) -> str | None:
    """Return the commit that is checked out around a directory, None outside of a repository.

    Local. It reads git's files: a process that uses MPI had better not start others.
    """
    top = next((p for p in (start, *start.parents) if (p / ".git").is_dir()), None)
    if top is None:
        return None
    git = top / ".git"
    try:
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        name = head.removeprefix("ref: ")
        if (git / name).exists():
            return (git / name).read_text().strip()
        packed = (git / "packed-refs").read_text().splitlines()
    except OSError:
        return None
    return next((line.split()[0] for line in packed if line.endswith(" " + name)), None)
