"""Time collective calls fairly: in turn, maximum over ranks, median and spread."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from lockstep import kernel
from lockstep.errors import CollectiveTimeout
from lockstep.launcher import short_version
from lockstep.waiting import wait_until
from lockstep.world import World

# A turn of a contender may take so long; a rank that is later than that does not come.
_LIMIT = 900.0


# Says whether to stop, the same on all ranks. Collective.
Told = Callable[[], bool]


def never() -> bool:
    """Do not stop before the time is over. Local."""
    return False


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
    contenders: Mapping[str, Callable[[], object]],
    *,
    calls: int,
    rounds: int,
) -> dict[str, Sample]:
    """Time contenders in turn, so that a drift of the machine meets all of them. Collective.

    A turn begins with a meeting of all ranks and a warm-up. Each call is then timed on every rank,
    back to back with the one before, and counts with the time of the slowest rank. There is no
    barrier of MPI between calls: it spins, and starves the threads of gloo on a machine without
    spare cores. The calls themselves wait for all ranks.

    Args:
        world: the ranks that take part.
        contenders: name and collective call of each.
        calls: calls of one contender in a turn, after a quarter as many to warm up.
        rounds: how often each contender has its turn.

    Returns:
        a Sample for each contender, the same on all ranks.

    Raises:
        CollectiveTimeout: a rank did not come to a meeting.
    """
    times: dict[str, list[np.ndarray]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, call in contenders.items():
            times[name].append(_turn(world, call, calls, max(1, calls // 4)))
    return {name: _sample(np.concatenate(parts)) for name, parts in times.items()}


def compare_within(
    world: World,
    contenders: Mapping[str, Callable[[], object]],
    seconds: float,
    *,
    rounds: int = 5,
    most: int = 400,
    told: Told = never,
) -> dict[str, Sample]:
    """Do what `compare` does, as often as there is time, three times at least. Collective.

    Args:
        world, contenders: as there.
        seconds: for all of them together; each gets the same share.
        rounds: turns of each, if there is time.
        most: calls in a turn.
        told: after a round: whether to stop now.
    """
    share = seconds / max(1, len(contenders)) / rounds
    times: dict[str, list[np.ndarray]] = {name: [] for name in contenders}
    # What a call may cost is known only after the first ones.
    cost: dict[str, float] = dict.fromkeys(contenders, share)
    spent = dict.fromkeys(contenders, 0.0)
    for round_ in range(rounds):
        if round_ and told():
            break
        for name, call in contenders.items():
            if round_ >= 3 and spent[name] + cost[name] > share * rounds:
                continue
            calls = max(1, min(most if round_ else 3, int(share / cost[name] / 1.25)))
            slowest = _turn(world, call, calls, calls // 4)
            times[name].append(slowest)
            cost[name] = float(slowest.mean())
            spent[name] += cost[name] * (calls + calls // 4)
    return {name: _sample(np.concatenate(parts)) for name, parts in times.items()}


def _turn(world: World, call: Callable[[], object], calls: int, warmup: int) -> np.ndarray:
    """Return the seconds of each call of a turn, those of the slowest rank. Collective."""
    from mpi4py import MPI  # here, so that to import this module starts no MPI

    meet(world)
    for _ in range(warmup):
        call()
    mine = np.empty(calls)
    for i in range(calls):
        start = time.perf_counter()
        call()
        mine[i] = time.perf_counter() - start
    meet(world)
    slowest = np.empty_like(mine)
    world.comm.Allreduce(mine, slowest, MPI.MAX)
    return slowest


def meet(world: World) -> None:
    """Wait for all ranks without spinning for long: some have nothing to do in a turn. Collective.

    Raises:
        CollectiveTimeout: a rank did not come.
    """
    if not wait_until(world.comm.Ibarrier().Test, _LIMIT):
        raise CollectiveTimeout(
            f"rank {world.rank} waited {_LIMIT:g} s for the others to take their turn",
            needed="every rank measures the same",
            cure="look at what the other ranks print or do",
        )


def _sample(times: np.ndarray) -> Sample:
    low, median, high = np.percentile(times, (25, 50, 75))
    return Sample(float(median), float(low), float(high), len(times))


def surroundings(world: World) -> dict[str, object]:
    """Return what a figure was measured with: machine, versions, cores, ranks, load. Local."""
    from mpi4py import MPI

    return {
        "torch": torch.__version__,
        "mpi": short_version(MPI.Get_library_version()),
        "python": platform.python_version(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "ranks": world.size,
        "nodes": world.nodes,
        "threads": torch.get_num_threads(),
        "kernel": "compiled" if kernel.library() is not None else "none",
        "load": round(os.getloadavg()[0], 2),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
