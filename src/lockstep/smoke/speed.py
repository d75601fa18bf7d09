"""Check the all-reduce by size: through MPI, through gloo, and beside the memory of a node."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.session import session
from lockstep.smoke.check import Check, Finding, Lab
from lockstep.smoke.pictures import Lines
from lockstep.world import World

# Bytes, each eight times the one before; the number of calls falls with the size.
SIZES = tuple(4 * 8**i for i in range(8))
_CALLS, _LEAST = 60, 3
# A size that takes longer than this, in seconds, is the last one.
_ENOUGH = 0.15
_VERB = 8.0


@dataclass(frozen=True)
class Facts:
    """Seconds by size: of an all-reduce over each backend, the slowest rank's; of a copy."""

    seconds: dict[str, list[float]]
    copy: list[float]


class Speed(Check):
    """How long an all-reduce takes."""

    name = "all-reduce"
    question = "How long does an all-reduce take, beside gloo's and a copy in memory?"
    limit = 30.0
    together = True

    def measure(self, lab: Lab) -> Facts:
        """Time both backends, then a copy."""
        seconds = {}
        for backend in ("mpi", "gloo"):
            with session(backend=backend, timeout=_VERB, quiet=True) as world:
                seconds[backend] = _all_reduces(world)
        return Facts(seconds, _copies())

    def judge(self, answers: Mapping[int, Facts], lab: Lab) -> Finding:
        """Nothing is compared with a number that every cluster would have to reach."""
        it = answers[0]
        found = Finding(_summary(it))
        mpi, gloo = it.seconds["mpi"], it.seconds["gloo"]
        both = min(len(mpi), len(gloo))
        worse = [SIZES[i] for i in range(both) if mpi[i] > 3 * gloo[i] and SIZES[i] >= 2**16]
        slower = (
            f"MPI needs more than three times as long as gloo for {max(worse, default=0)} bytes"
        )
        if lab.world.nodes > 1 and worse and lab.crowded:
            where = "; ".join(f"{host}: {why}" for host, why in lab.crowded.items())
            found.warn(
                f"{slower}; its ranks spin while they wait, and {where}",
                "a core for each rank, with no other work on it; then ask again",
            )
        elif lab.world.nodes > 1 and worse:
            found.warn(
                f"{slower}: it may have taken a slow network",
                "mpirun --mca btl_tcp_if_include IFACE (Open MPI), FI_TCP_IFACE=IFACE (Intel MPI); "
                "or --backend gloo",
            )
        found.details = {
            "bytes": list(SIZES),
            "mpi_seconds": mpi,
            "gloo_seconds": gloo,
            "copy_seconds": it.copy,
        }
        times = it.seconds | {"copy in the memory of one node": it.copy}
        series = {name: [s * 1e6 for s in values] for name, values in times.items()}
        found.pictures = [Lines("all-reduce of float32, µs", "bytes", SIZES, series)]
        return found


def _summary(it: Facts) -> str:
    def of(name: str, i: int) -> str:
        return f"{name} {it.seconds[name][i] * 1e6:.0f} µs"

    texts = []
    for i, label in ((0, "4 B"), (SIZES.index(4 * 8**6), "1 MiB")):
        if all(len(times) > i for times in it.seconds.values()):
            texts.append(f"{label}: {of('mpi', i)}, {of('gloo', i)}")
    return "; ".join(texts)


def _all_reduces(world: World) -> list[float]:
    """Return the median by size, of the slowest rank; the same on all. Collective."""
    import torch
    import torch.distributed as dist

    found: list[float] = []
    for size in SIZES:
        tensor = torch.zeros(size // 4)
        dist.all_reduce(tensor)  # to warm up
        times = []
        for _ in range(max(_LEAST, min(_CALLS, 2**22 // size))):
            start = time.perf_counter()
            dist.all_reduce(tensor)
            times.append(time.perf_counter() - start)
            if sum(times) > _ENOUGH and len(times) >= _LEAST and world.size == 1:
                break
        slowest = torch.tensor([statistics.median(times)], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        found.append(slowest.item())
        if found[-1] > _ENOUGH:
            break
    return found


def _copies() -> list[float]:
    import torch

    found = []
    for size in SIZES:
        source = torch.zeros(size // 4)
        target = torch.empty_like(source)
        times = []
        for _ in range(7):
            start = time.perf_counter()
            target.copy_(source)
            times.append(time.perf_counter() - start)
        found.append(statistics.median(times))
    return found
