"""Load a data set on all ranks; what is wrong on one is an error on all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from lockstep.data import mnist, sample
from lockstep.data.images import Images
from lockstep.errors import DataError, LockstepError
from lockstep.waiting import wait_until
from lockstep.world import World

# Seconds; the slowest download that is still waited for.
LIMIT = 900.0

T = TypeVar("T")


def load(world: World, name: str, directory: Path) -> tuple[Images, Images]:
    """Return the images to train with and those to test with. Collective.

    Args:
        world: the ranks; each reads the files itself.
        name: "sample", the 4,000 + 1,000 digits that need no file, or "mnist", all 60,000 + 10,000.
        directory: where MNIST lies or is to be put, as `MNIST/raw/*`, the way torchvision does it.

    Raises:
        DataError: on all ranks alike, what is missing or wrong on any of them.
    """
    if name == "sample":
        return on_all(world, sample.load)
    # One rank a node, and of several nodes that share the directory one: there is a lock.
    if world.local_rank == 0:
        on_all(world, lambda: mnist.fetch(directory, LIMIT))
    else:
        on_all(world, lambda: None)
    return on_all(world, lambda: mnist.load(directory))


def on_all(world: World, action: Callable[[], T], limit: float = LIMIT) -> T:
    """Do something on this rank; if it fails on any, raise that failure on all. Collective.

    Args:
        world: the ranks.
        action: raises a LockstepError if it fails.
        limit: seconds to wait for the slowest rank.

    Returns:
        what the action returned on this rank.

    Raises:
        LockstepError: that of the lowest rank that failed.
        DataError: another rank has not come within the limit.
    """
    result, failure = None, None
    try:
        result = action()
    except LockstepError as error:
        failure = error
    if not wait_until(world.comm.Ibarrier().Test, limit):
        raise DataError(
            f"{world} waited {limit:g} s for the other ranks to load their data",
            needed="every rank reads the data within that time",
            cure="look at what the other ranks print, and at how fast the directory is",
        )
    everyone = world.comm.allgather((world.host, failure))
    for rank, (host, other) in enumerate(everyone):
        if other is not None:
            alone = sum(it is not None for _, it in everyone) < world.size
            found = f"rank {rank} ({host}): {other.found}" if alone else other.found
            raise type(other)(found, needed=other.needed, cure=other.cure)
    return result  # type: ignore[return-value]  # the action has not failed
