"""Time collective calls fairly: in turn, maximum over ranks, median and spread."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from mpi4py import MPI

from lockstep.world import World


@dataclass(frozen=True)
class Sample:
    """Times of one contender at one size.

    Attributes:
        median: seconds, of the maxima over all ranks.
        low, high: the quartiles around it, in seconds.
        n: number of calls that were timed.
    """

    median: float
    low: float
    high: float
    n: int


def compare(
    world: World,
    contenders: dict[str, Callable[[], object]],
    *,
    calls: int,
    rounds: int,
) -> dict[str, Sample]:
    """Time contenders in turn, so that a drift of the machine meets all of them. Collective.

    Each call is timed on every rank, back to back with the one before, and counts with the time of
    the slowest rank. There is no MPI barrier between calls: it spins, and starves the threads of
    gloo on a machine without spare cores. The calls themselves wait for all ranks.

    Args:
        world: the ranks that take part.
        contenders: name and collective call of each.
        calls: calls of one contender in a round, after a quarter as many to warm up.
        rounds: how often each contender has its turn.

    Returns:
        a Sample for each contender, the same on all ranks.
    """
    times: dict[str, list[np.ndarray]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, call in contenders.items():
            for _ in range(max(1, calls // 4)):
                call()
            mine = np.empty(calls)
            for i in range(calls):
                start = time.perf_counter()
                call()
                mine[i] = time.perf_counter() - start
            slowest = np.empty_like(mine)
            world.comm.Allreduce(mine, slowest, MPI.MAX)
            times[name].append(slowest)
    return {name: _sample(np.concatenate(parts)) for name, parts in times.items()}


def _sample(times: np.ndarray) -> Sample:
    low, median, high = np.percentile(times, (25, 50, 75))
    return Sample(float(median), float(low), float(high), len(times))


def surroundings(world: World) -> dict[str, object]:
    """Return what a figure was measured with: versions, cores, ranks, load. Local."""
    return {
        "torch": torch.__version__,
        "mpi": " ".join(MPI.Get_library_version().split()[:3]).strip("\0"),
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "ranks": world.size,
        "load": round(os.getloadavg()[0], 2),
    }
