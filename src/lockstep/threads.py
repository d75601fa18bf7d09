"""How many threads a rank may use: the cores that the launcher gave, shared fairly."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from lockstep.world import World

_set = False


def set_threads(world: World, threads: int | None = None) -> int:
    """Set torch's threads for this process, once; later calls change nothing. Collective.

    A rank that is bound to cores of its own takes them; ranks that share cores divide them. An
    OMP_NUM_THREADS in the environment is respected: torch has obeyed it when it was imported.

    Args:
        world: the ranks; those of a node may share cores.
        threads: a number to take instead.

    Returns:
        how many threads torch uses in this process.
    """
    global _set
    everyone = world.comm.allgather((world.node, tuple(sorted(os.sched_getaffinity(0)))))
    if not _set and (threads or not os.environ.get("OMP_NUM_THREADS")):
        torch.set_num_threads(threads or share(everyone, world.rank))
        _set = True
    return torch.get_num_threads()


def share(everyone: Sequence[tuple[int, Sequence[int]]], rank: int) -> int:
    """Return how many threads a rank may use, at least 1. Local.

    Args:
        everyone: each rank's node and the cores that it may run on.
        rank: the rank that asks.
    """
    node, cores = everyone[rank]
    mine = set(cores)
    sharing = sum(node == other and not mine.isdisjoint(theirs) for other, theirs in everyone)
    return max(1, len(mine) // max(1, sharing))
