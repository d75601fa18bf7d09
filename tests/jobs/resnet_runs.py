"""Start jobs/resnet_ddp.py under a real mpirun, follow it, and end it in the middle."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from launching import ROOT, Outcome, Program, need

JOB = str(ROOT / "jobs" / "resnet_ddp.py")
LIMIT = 240.0
LEFT_EARLY = 85


def command(ranks: int, *flags: object) -> list[str]:
    """Return the command of the job on so many ranks."""
    return need("openmpi").command(ranks, JOB, *map(str, flags))


def begin(ranks: int, directory: Path, *flags: object, name: str = "out", **env: str) -> Program:
    """Start the job; its output goes to a file of that name."""
    return Program(command(ranks, *flags), need("openmpi").environment(**env), directory, name)


def run(
    ranks: int,
    directory: Path,
    *flags: object,
    name: str = "out",
    limit: float = LIMIT,
    **env: str,
) -> Outcome:
    """Run the job to its end."""
    outcome = begin(ranks, directory, *flags, name=name, **env).finish(limit)
    assert not outcome.timed_out, outcome
    return outcome


def good(outcome: Outcome, run_directory: Path) -> Outcome:
    """See that a run has come to its end."""
    assert outcome.code == 0, outcome
    assert (run_directory / "DONE").exists(), outcome
    return outcome


def refused(outcome: Outcome, error: str, *words: str) -> None:
    """See that all ranks have ended at once, with one error that says what is wrong."""
    assert outcome.code not in (0, None, LEFT_EARLY), outcome
    assert error in outcome.text, outcome
    for word in words:
        assert word in outcome.text, outcome


def records(run_directory: Path) -> list[dict[str, Any]]:
    """Return what metrics.jsonl holds by now; a line that is being written is left out."""
    path = run_directory / "metrics.jsonl"
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def last_step(run_directory: Path) -> int:
    """Return the step that was recorded last, 0 if there is none."""
    steps = [it["global_step"] for it in records(run_directory) if it["kind"] == "step"]
    return steps[-1] if steps else 0


def wait_for_step(program: Program, run_directory: Path, step: int, known: int = 0) -> None:
    """Wait until a step is recorded, behind the records that were known before the start."""
    end = time.monotonic() + LIMIT
    while True:
        steps = [it["global_step"] for it in records(run_directory)[known:] if it["kind"] == "step"]
        if steps and steps[-1] >= step:
            return
        if time.monotonic() > end or program.process.poll() is not None:
            program.end()
            pytest.fail(f"step {step} was not reached:\n{program.text()[-5000:]}")
        time.sleep(0.002)


def processes(program: Program) -> list[int]:
    """Return the processes of the job's ranks, in the order in which they were started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                arguments = (entry / "cmdline").read_bytes().split(b"\0")
                mine = int(fields[3]) == program.process.pid and fields[0] != "Z"
                if mine and arguments[1:2] == [JOB.encode()]:
                    found.append(int(entry.name))
    return sorted(found)


def send(program: Program, number: signal.Signals, rank: int) -> None:
    """Send a signal to a rank."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(processes(program)[rank], number)


def kill(program: Program) -> None:
    """Kill all ranks, then mpirun, so that none of them can do anything more."""
    for pid in [*processes(program), program.process.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    program.end()


def weights(path: Path) -> dict[str, torch.Tensor]:
    """Return an exported model."""
    from safetensors.torch import load_file

    return load_file(path)


def assert_same_bits(one: Path, other: Path) -> None:
    """Compare two exported models."""
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    wrong = [name for name, tensor in first.items() if not torch.equal(tensor, second[name])]
    assert not wrong


def results(run_directory: Path) -> list[dict[str, str]]:
    """Return the rows of results.csv."""
    with (run_directory / "results.csv").open() as file:
        return list(csv.DictReader(file))


def measured(run_directory: Path) -> list[tuple[str, ...]]:
    """Return what results.csv says and no clock has measured."""
    return [tuple(row[name] for name in ("epoch", "loss", "acc")) for row in results(run_directory)]


def make_pictures(directory: Path, train: int = 12, test: int = 5) -> Path:
    """Make a set of three classes as JPEG files, each class of a colour of its own."""
    generator = torch.Generator().manual_seed(3)
    for part, count in (("train", train), ("test", test)):
        for number, name in enumerate(("cat", "dog", "owl")):
            folder = directory / part / name
            folder.mkdir(parents=True)
            for i in range(count):
                noise = torch.randint(0, 100, (32, 32, 3), generator=generator, dtype=torch.uint8)
                noise[:, :, number] += 120
                Image.fromarray(noise.numpy()).save(folder / f"{i:04}.jpg")
    return directory
