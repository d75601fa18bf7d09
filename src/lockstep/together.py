"""Do something on every rank, with one outcome for all: what fails on one fails on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from lockstep import notes
from lockstep.ending import SETTLE, within
from lockstep.errors import CollectiveTimeout, LockstepError, StorageError
from lockstep.waiting import wait_until
from lockstep.world import World

T = TypeVar("T")

# Seconds: the slowest disk that is still waited for.
LIMIT = 900.0


def on_all(world: World, action: Callable[[], T], doing: str, limit: float = LIMIT) -> T:
    """Do something on this rank; if it fails on any, raise that failure on all. Collective.

    Args:
        world: the ranks.
        action: raises a LockstepError if it fails, or an OSError or MemoryError.
        doing: what it does, for the error of a rank that never came.
        limit: seconds to wait for the slowest rank.

    Returns:
        what the action returned on this rank.

    Raises:
        LockstepError: that of the lowest rank that failed; a StorageError in place of an OSError.
        CollectiveTimeout: another rank has not come within the limit.
    """
    result: Any = None
    failure: LockstepError | None = None
    try:
        result = action()
    except LockstepError as error:
        failure = error
    except (OSError, MemoryError) as error:
        failure = StorageError(
            f"cannot {doing}: {type(error).__name__}: {error}",
            needed="files that this rank may read and write, and room in memory and on disk",
            cure="look at that path: `ls -ld`, `df -h`; and at the memory: `free -h`, `ulimit -a`",
        )
        failure.__cause__ = error
    arrive(world, doing, limit)
    with within(limit + SETTLE, doing):
        everyone = world.comm.allgather((world.host, failure))
    for rank, (host, other) in enumerate(everyone):
        if other is not None:
            alone = sum(it is not None for _, it in everyone) < world.size
            found = f"rank {rank} ({host}): {other.found}" if alone else other.found
            raise type(other)(found, needed=other.needed, cure=other.cure) from failure
    found_here: T = result
    return found_here


def on_root(world: World, action: Callable[[], None], doing: str, limit: float = LIMIT) -> None:
    """Do something on the root alone; its failure is raised on all ranks. Collective."""
    on_all(world, action if world.rank == 0 else lambda: None, doing, limit)


def arrive(world: World, doing: str, limit: float = LIMIT) -> None:
    """Wait until all ranks have come. Collective.

    Raises:
        CollectiveTimeout: some rank has not come within the limit, in seconds.
    """
    with notes.during("world", doing, limit):
        come = wait_until(world.comm.Ibarrier().Test, limit)
        if not come:
            notes.explain()  # before the call is over
    if not come:
        raise CollectiveTimeout(
            f"{world} waited {limit:g} s for the other ranks to {doing}",
            needed="every rank comes to the same point within that time",
            cure="look at what the other ranks print, and at how fast the disk is",
        )
