"""Check a cluster before training on it: launch, software, files, CPUs, memory, network, torch.

    mpirun -np 4 python jobs/smoke.py
    mpirun -np 4 python jobs/smoke.py --shared /shared/dir --data-dir /shared/data

It takes less than a minute and cannot hang: each check has a limit, and a rank that does not answer
is named. The root prints a table and writes smoke.json and smoke.html. The exit code is 0 if all is
well or there are warnings only, 1 if a check failed, 2 if there is no world to check; DONE in the
run directory holds it too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import lockstep
from lockstep import World, smoke
from lockstep.ending import abort
from lockstep.errors import LockstepError
from lockstep.settings import Checked, flag, parse

# In this order: what comes later relies on what comes before.
CHECKS = (
    smoke.Launch(),
    smoke.Software(),
    smoke.SharedPath(),
    smoke.Cpus(),
    smoke.Memory(),
    smoke.Gpus(),
    smoke.Network(),
    smoke.Groups(),
    smoke.Speed(),
    smoke.Data(),
)


@dataclass(frozen=True)
class Settings(Checked):
    shared: Path | None = flag(None, "directory that all nodes share (default: where it writes)")  # noqa: RUF009
    data_dir: Path | None = flag(None, "where MNIST and CIFAR-10 are")  # noqa: RUF009
    per_node: int | None = flag(None, "ranks expected on each node")
    hostfile: Path | None = flag(None, "the launcher's, to compare with")  # noqa: RUF009
    limit: float = flag(30.0, "seconds that a check may take; above 30 all get more")
    within: float = flag(50.0, "seconds that all checks together may take")
    run_dir: Path = flag(Path("runs"), "where the run's directory is made")  # noqa: RUF009
    run: Path | None = flag(None, "the run's directory itself, kept if it is there")  # noqa: RUF009

    def __post_init__(self) -> None:
        super().__post_init__()
        self._need_above_0("limit", "within")
        self._need("per_node", self.per_node is None or self.per_node > 0, "above 0")


def main(argv: Sequence[str] | None = None) -> int:
    settings = parse(Settings, argv, __doc__)
    world = meet(settings)
    options = smoke.Options(
        shared=settings.shared or settings.run or settings.run_dir,
        data_dir=settings.data_dir,
        per_node=settings.per_node,
        hostfile=settings.hostfile,
        limit=settings.limit,
        within=settings.within,
    )
    return smoke.conduct(world, CHECKS, options, lambda: open_report(world, settings))


def meet(settings: Settings) -> World:
    # ranks that do not even start are not waited for as long as a training job would
    os.environ.setdefault("LOCKSTEP_START_TIMEOUT", str(max(settings.limit, 5.0)))
    try:
        return lockstep.discover()
    except LockstepError as error:
        sys.stderr.write(f"smoke test: could not run\n{type(error).__name__}: {error}\n")
        abort(2)


def open_report(world: World, settings: Settings) -> smoke.Report:
    if settings.run is not None:
        directory = smoke.kept_directory(settings.run)
    else:
        directory = smoke.fresh_directory(settings.run_dir)
    return smoke.Report(world, directory, list(CHECKS))


if __name__ == "__main__":
    lockstep.run(main)
