"""Do locks hold across hosts? Append under a lock from every host, count, and try a held lock.

torch's FileStore appends its records under a lock of flock(2). Where both hosts get the lock, they
write over each other's records, and the ranks wait for what is lost. Asking for a lock is no proof:
some file systems grant it and still show the other host an old length of the file. Nor is the count
alone: on a loaded machine one host may be done before the other begins.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lockstep.rendezvous.agree import gather, limited
from lockstep.rendezvous.directory import ANSWER, write
from lockstep.waiting import wait_until
from lockstep.world import World

# Records that all writers together append, and at least and at most each.
_ALL, _LEAST, _MOST = 400, 8, 25
# With one host only, so many of its ranks write.
_ON_ONE_HOST = 4
# Seconds for a reader's cache to show the last record.
_SETTLE = 5.0


@dataclass(frozen=True)
class Race:
    """How many records were kept, and what went wrong besides."""

    kept: int
    written: int
    trouble: str = ""

    @property
    def holds(self) -> bool:
        """Whether every record was kept."""
        return not self.trouble and self.kept == self.written

    def __str__(self) -> str:
        text = f"{self.kept} of {self.written} records appended under a lock were kept"
        return f"{text}; {self.trouble}" if self.trouble else text


def race(world: World, place: Path) -> Race:
    """Append records under a lock from every host, then count them on every host. Collective.

    Args:
        place: a directory that all ranks see.

    Returns:
        the worst that any host has seen; the same on all ranks.
    """
    path = place / "race"
    writes = world.local_rank == 0 or (world.nodes == 1 and world.local_rank < _ON_ONE_HOST)
    writers = sum(gather(world, writes))
    each = max(_LEAST, min(_MOST, _ALL // writers))
    made = gather(world, _attempt(lambda: _make(path)) if world.rank == 0 else 0)[0]
    if isinstance(made, str):
        return Race(0, each * writers, made)
    appended = _attempt(lambda: _append(path, world.rank, each)) if writes else each
    gather(world, None)
    kept = appended
    if writes and isinstance(appended, int):
        kept = _attempt(lambda: _count(path, each * writers))
    found = [one for one, wrote in gather(world, (kept, writes)) if wrote]
    troubles = [one for one in found if isinstance(one, str)]
    if troubles:
        return Race(0, each * writers, troubles[0])
    kept_by_all = min(one for one in found if isinstance(one, int))
    return Race(kept_by_all, each * writers, _held_twice(world, path))


def _held_twice(world: World, path: Path) -> str:
    """Return "" if no other host gets a lock that the root holds, else who did. Collective."""
    if world.nodes == 1:
        return ""
    handle = _attempt(lambda: _lock(path, fcntl.LOCK_EX)) if world.rank == 0 else 0
    got: int | str = -1
    try:
        gather(world, None)
        if world.local_rank == 0 and world.node > 0:
            got = _attempt(lambda: _lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB))
        found = gather(world, (world.host, got if world.rank else handle))
    finally:
        for one in (handle, got):
            if isinstance(one, int) and one > 0:
                os.close(one)
    for host, one in found[1:]:
        if isinstance(one, str) or one > 0:
            return f"{host}: {one}" if isinstance(one, str) else f"{host} got a lock held elsewhere"
    return str(found[0][1]) if isinstance(found[0][1], str) else ""


def _lock(path: Path, how: int) -> int:
    """Return a handle that holds the lock, -1 if another has it. Local."""
    handle = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(handle, how)
    except BlockingIOError:
        os.close(handle)
        return -1
    except OSError:
        os.close(handle)
        raise
    return handle


def _attempt(what: Callable[[], int]) -> int | str:
    """Return the number, or what the file system said instead. Local, with a limit."""
    try:
        return limited(what, ANSWER)
    except OSError as error:  # TimeoutError is one
        return error.strerror or str(error)


def _make(path: Path) -> int:
    write(path, b"")
    return 0


def _append(path: Path, rank: int, each: int) -> int:
    """Append as torch's FileStore does: open, lock, go to the end, write. Local."""
    for i in range(each):
        handle = os.open(path, os.O_RDWR)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            os.lseek(handle, 0, os.SEEK_END)
            os.write(handle, _record(rank, i))
            fcntl.flock(handle, fcntl.LOCK_UN)
        finally:
            os.close(handle)
    return each


def _record(rank: int, i: int) -> bytes:
    return b"%08d:%04d\n" % (rank, i)


def _count(path: Path, written: int) -> int:
    """Count the whole records, for as long as a cache may hide the last ones. Local."""
    kept = 0

    def all_there() -> bool:
        nonlocal kept
        handle = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_SH)
            content = os.pread(handle, (written + 1) * len(_record(0, 0)), 0)
        finally:
            os.close(handle)
        kept = len({line for line in content.splitlines() if len(line) == len(_record(0, 0)) - 1})
        return kept == written

    wait_until(all_there, _SETTLE)
    return kept
