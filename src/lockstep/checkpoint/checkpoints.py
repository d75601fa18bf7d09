"""Save the whole state of a training on all ranks, and go on from it."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from lockstep.checkpoint.container import decode
from lockstep.checkpoint.folder import FORMAT, Folder, Found, newest, read
from lockstep.checkpoint.random_state import random_state, seed_for
from lockstep.checkpoint.state import copied
from lockstep.checkpoint.writer import Writer
from lockstep.ending import SETTLE, within
from lockstep.errors import CheckpointError, LockstepError, SettingsError, counted
from lockstep.together import LIMIT, arrive, on_all
from lockstep.world import World

_PIECE = 2**28
# Seconds that the end of a rank that failed is put off for.
_LAST_WRITE = 10.0


class Checkpoints:
    """The checkpoints of a run. Making it is Collective; the root reads and writes.

    A checkpoint is a file of its own, `checkpoint-NUMBER-step-STEP.pt`, readable by its owner only;
    torch.load opens it with weights_only=True. It has its name only when it is whole and on disk.
    Use it in a ``with``: at the end it waits for the file that is being written.

    Args:
        world: the ranks.
        directory: for the checkpoints of this run alone; made if it is missing.
        keep: how many valid ones stay, 1 or more.
        every_steps: save when so many steps are done; 0 for never.
        every_minutes: save when so many minutes have passed on the root; 0 for never.
        asynchronous: write while training goes on, which then waits for the copy only.
        timeout: seconds to wait for the other ranks, and for the disk.

    Raises:
        SettingsError: a number is out of range.
        StorageError: on all ranks: the directory cannot be used, or another job is using it.
    """

    def __init__(
        self,
        world: World,
        directory: Path,
        *,
        keep: int = 3,
        every_steps: int = 0,
        every_minutes: float = 0.0,
        asynchronous: bool = True,
        timeout: float = LIMIT,
    ) -> None:
        _check(keep, every_steps, every_minutes)
        self._world, self.directory, self._timeout = world, directory, timeout
        self._steps, self._minutes, self._asynchronous = every_steps, every_minutes, asynchronous
        self._writer, self._last = Writer(), time.monotonic()
        self._root = world.rank == 0
        self._folder = on_all(
            world, lambda: Folder(directory, keep) if self._root else None, "open the checkpoints"
        )

    def resume(self, which: str = "auto") -> dict[str, Any] | None:
        """Read a checkpoint. Collective; the root reads it and sends it to the others.

        Args:
            which: "auto", the newest valid one of this run, if there is any; "none"; or the path
                of a checkpoint, or of a directory of them.

        Returns:
            None to start anew; otherwise the state as it was given to `save`, the same on all
            ranks, with tensors on the CPU, and besides: "random", for `restore_random`, and "own"
            of this rank; "saved_ranks", the number of ranks then; "source", the file. A rank that
            did not exist then has None as "own", and random numbers of a start of its own.

        Raises:
            CheckpointError: on all ranks: what was asked for is damaged, or no checkpoint.
            StorageError: on all ranks: it cannot be read.
        """
        if which == "none":
            return None
        found = on_all(
            self._world, lambda: self._find(which) if self._root else None, "read the checkpoint"
        )
        data = self._from_root(None if found is None else found.data)
        if data is None:
            return None
        source = found.path if found is not None else Path("what the root has sent")
        content = found.content if found is not None else None
        if content is None:
            content = decode(data, str(source))
        return self._picked(content, str(source))

    def due(self, step: int) -> bool:
        """Say whether this rank finds that a checkpoint is due. Local; the ranks have to agree.

        Args:
            step: number of steps done since the start of the training.

        Returns:
            also True when the last one could not be written: then `save` raises on all ranks.
        """
        if self._writer.failed or (self._steps and step % self._steps == 0):
            return True
        seconds = time.monotonic() - self._last
        return bool(self._root and self._minutes and seconds >= 60.0 * self._minutes)

    def save(self, step: int, state: dict[str, Any], own: dict[str, Any] | None = None) -> None:
        """Save the state, and the random states of all ranks. Collective.

        Returns when it is copied; see `wait`.

        Args:
            step: number of steps done since the start of the training.
            state: that of the root is saved: tensors, numbers, texts, and lists and dicts of them.
            own: what belongs to this rank alone, likewise.

        Raises:
            StorageError, CheckpointError: on all ranks: the last checkpoint could not be written,
                or there is something in the state that cannot be read back.
        """
        mine = on_all(self._world, lambda: self._copy(state, own), "save", self._timeout + SETTLE)
        with within(self._timeout + SETTLE, "gathering the states of the ranks"):
            ranks = self._world.comm.gather((mine["random"], mine["own"]), root=0)
        self._last = time.monotonic()
        if self._folder is not None and ranks is not None:
            folder = self._folder
            content = {
                "format": FORMAT,
                "step": step,
                "state": mine["state"],
                "random": [random for random, _ in ranks],
                "own": [own for _, own in ranks],
            }
            self._writer.start(lambda: folder.write(step, content))
        if not self._asynchronous:
            self.wait()

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk. Collective.

        Raises:
            StorageError, CheckpointError: on all ranks: it could not be written.
        """
        on_all(
            self._world,
            lambda: self._writer.wait(self._timeout),
            "write the checkpoint",
            self._timeout + SETTLE,
        )

    def close(self) -> None:
        """Wait until the last checkpoint is on disk, and let go of the directory. Collective."""
        try:
            self.wait()
        finally:
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        # The others may not come any more; but what is being written is worth a short while.
        try:
            self._writer.wait(min(self._timeout, _LAST_WRITE))
        except LockstepError as other:
            print(other, file=sys.stderr)
        finally:
            self._release()

    def _release(self) -> None:
        if self._folder is not None:
            self._folder.lock.release()

    def _find(self, which: str) -> Found | None:
        """Return the checkpoint that was asked for. Local, on the root."""
        if which == "auto":
            return None if self._folder is None else self._folder.newest()
        path = Path(which)
        found = newest(path)[0] if path.is_dir() else read(path)
        if found is None:
            raise CheckpointError(
                f"there is no checkpoint in {path}",
                needed="files such as checkpoint-000001-step-100.pt",
                cure="name another directory or file, or --resume auto",
            )
        return found

    def _copy(self, state: dict[str, Any], own: dict[str, Any] | None) -> dict[str, Any]:
        """Copy what this rank contributes, after the last one is written. Local."""
        self._writer.wait(self._timeout)
        return {
            "random": random_state(),
            "own": copied(own, "own"),
            "state": copied(state) if self._root else None,
        }

    def _from_root(self, data: bytes | None) -> bytes | None:
        """Give all ranks the root's bytes. Collective."""
        arrive(self._world, "read the checkpoint", self._timeout)
        with within(self._timeout + SETTLE, "sending the checkpoint to all ranks"):
            size = self._world.comm.bcast(None if data is None else len(data), root=0)
            if size is None or self._world.size == 1:
                return data
            buffer = np.frombuffer(data, np.uint8).copy() if data else np.empty(size, np.uint8)
            for start in range(0, size, _PIECE):
                self._world.comm.Bcast(buffer[start : start + _PIECE], root=0)
        return data if data is not None else buffer.tobytes()

    def _picked(self, content: dict[str, Any], source: str) -> dict[str, Any]:
        """Return the state with what belongs to this rank. Local."""
        _require_whole(content, source)
        random, own = content["random"], content["own"]
        rank, then, now = self._world.rank, len(random), self._world.size
        if self._root and then != now:
            low, high = sorted((then, now))
            which = f"rank {low}" if high == low + 1 else f"ranks {low} to {high - 1}"
            more = f"random states drawn anew from the root's: {which}"
            less = f"random states left out: {which}"
            print(
                f"{source}: saved by {counted(then, 'rank')}, resumed on {now}: "
                f"{more if now > then else less}"
            )
        return {
            **content["state"],
            "random": random[rank] if rank < then else seed_for(rank, random[0]),
            "own": own[rank] if rank < then else None,
            "saved_ranks": then,
            "source": source,
        }


def _require_whole(content: dict[str, Any], source: str) -> None:
    random, own = content.get("random"), content.get("own")
    lists = isinstance(random, list) and isinstance(own, list) and 0 < len(random) == len(own)
    if not lists or not isinstance(content.get("state"), dict):
        raise CheckpointError(
            f"{source} holds no state of a training and its ranks",
            needed="a file that `Checkpoints.save` has written",
            cure="name another with --resume, or --resume none",
        )


def _check(keep: int, every_steps: int, every_minutes: float) -> None:
    for flag, value, least in (
        ("keep", keep, 1),
        ("every_steps", every_steps, 0),
        ("every_minutes", every_minutes, 0),
    ):
        if not value >= least:
            raise SettingsError(
                f"found {flag}={value!r}", needed=f"{least} or more", cure="change it"
            )
