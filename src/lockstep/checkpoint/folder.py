"""The directory of a run's checkpoints: names, the newest valid one, the last few. All Local.

They are numbered in the order in which they were saved, which is not that of their steps once a
run has been resumed at an earlier one.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep import files
from lockstep.checkpoint import container
from lockstep.errors import CheckpointError
from lockstep.lock import DirectoryLock

FORMAT = 1
_NAME = re.compile(r"checkpoint-(\d{6,})-step-(\d+)\.pt")


@dataclass(frozen=True, order=True)
class Saved:
    """A checkpoint by its name: the how-many-eth it is, the steps done, its file."""

    number: int
    step: int
    path: Path


@dataclass(frozen=True)
class Found:
    """A checkpoint that was read: its file, all its bytes, and what they mean."""

    path: Path
    data: bytes
    content: dict[str, Any]


class Folder:
    """The directory, held for this process alone.

    Args:
        path: made if it is missing, for the owner only.
        keep: number of valid checkpoints that stay.

    Raises:
        StorageError: it cannot be made or written to, or another job uses it.
    """

    def __init__(self, path: Path, keep: int) -> None:
        self.path, self._keep = path, keep
        self._damaged: set[Path] = set()
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise files.failure(error, "make the directory of the checkpoints", path) from error
        self.lock = DirectoryLock(path, "wait for that job, or give this one another directory")
        try:
            # Without a lock another job might be writing at this moment.
            if self.lock.held:
                files.clean(path)
            self._next = 1 + max((saved.number for saved in self.saved()), default=0)
        except OSError as error:
            self.lock.release()
            raise files.failure(error, "use the directory of the checkpoints", path) from error

    def saved(self) -> list[Saved]:
        """Return what is there, the oldest first."""
        return listing(self.path)

    def newest(self) -> Found | None:
        """Return the newest checkpoint that is valid, None if there is none at all.

        A damaged one is passed over, with a line on stderr.

        Raises:
            CheckpointError: all that are there are damaged.
        """
        found, damaged = newest(self.path)
        self._damaged |= damaged
        return found

    def write(self, step: int, content: dict[str, Any]) -> Path:
        """Write one more checkpoint, then remove those that are too old.

        Raises:
            StorageError: it cannot be written; the older ones are still there.
        """
        path = self.path / f"checkpoint-{self._next:06d}-step-{step}.pt"
        self._next += 1
        try:
            with files.fresh(path) as file:
                container.write(file, content)
        except OSError as error:
            raise files.failure(error, "write the checkpoint", path) from error
        self._prune()
        return path

    def _prune(self) -> None:
        """Keep the last few valid ones; a damaged one goes with the valid ones of its age."""
        there = self.saved()
        valid = [saved for saved in there if saved.path not in self._damaged]
        for saved in there:
            if valid and saved < valid[-self._keep :][0]:
                try:
                    saved.path.unlink(missing_ok=True)
                except OSError as error:
                    print(f"{saved.path} cannot be removed: {error.strerror}", file=sys.stderr)


def listing(directory: Path) -> list[Saved]:
    """Return the checkpoints in a directory by their names, the oldest first."""
    matches = [(_NAME.fullmatch(path.name), path) for path in directory.iterdir()]
    return sorted(Saved(int(m[1]), int(m[2]), path) for m, path in matches if m)


def newest(directory: Path) -> tuple[Found | None, set[Path]]:
    """Return the newest valid checkpoint of a directory, and the damaged ones that are newer.

    Raises:
        CheckpointError: there are some, and all are damaged.
        StorageError: the directory cannot be read.
    """
    damaged: set[Path] = set()
    try:
        candidates = listing(directory)
    except OSError as error:
        raise files.failure(error, "read the checkpoints in", directory) from error
    for saved in reversed(candidates):
        try:
            return read(saved.path), damaged
        except container.Damaged as error:
            print(f"checkpoint passed over: {error}", file=sys.stderr, flush=True)
            damaged.add(saved.path)
    if candidates:
        raise CheckpointError(
            f"none of the {len(candidates)} checkpoints in {directory} is whole",
            needed="one that is",
            cure="--resume none starts anew and leaves them where they are, until newer ones "
            "push them out",
        )
    return None, damaged


def read(path: Path) -> Found:
    """Read one checkpoint.

    Raises:
        Damaged: it is not whole.
        CheckpointError: it is of a later format.
        StorageError: it cannot be read.
    """
    try:
        data = container.read(path)
    except OSError as error:
        raise files.failure(error, "read the checkpoint", path) from error
    content = container.decode(data, str(path))
    if content["format"] != FORMAT:
        raise CheckpointError(
            f"{path} has format {content['format']}",
            needed=f"format {FORMAT}",
            cure="use the version of Lockstep that wrote it",
        )
    return Found(path, data, content)
