"""Check the CPUs: has every rank cores of its own, and are they as fast as the others'?"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import counted
from lockstep.rendezvous.agree import gather
from lockstep.smoke.check import Check, Finding, Lab
from lockstep.smoke.compare import by_node, named, spans
from lockstep.smoke.pictures import Bars
from lockstep.smoke.usage import Busy, busiest
from lockstep.threads import share

# The work: products of two matrices of this size, so many at a time, so many times.
_SIZE, _PRODUCTS, _TIMES = 384, 20, 7
# A rank that needs so many times what most need is slow.
SLOW = 1.5
# A rank that has less of a core than this shares it, with other ranks or with other work.
SHARE = 0.8


@dataclass(frozen=True)
class Facts:
    """Cores that the rank may use, threads it was told to use, and how long the work took.

    `got` is the share of a core that the rank had meanwhile: CPU time over time.
    """

    cores: tuple[int, ...]
    present: int
    quota: float | None
    threads: int | None
    seconds: float
    busy: tuple[Busy, ...]
    got: float = 1.0


class Cpus(Check):
    """Whether cores are shared out fairly, and which rank or node is slow."""

    name = "cpus"
    question = "Has every rank cores of its own, and are all as fast as the others?"
    limit = 15.0
    together = True

    def measure(self, lab: Lab) -> Facts:
        """Do a fixed work, at the same time as all others."""
        told = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
        gather(lab.world, None)
        watch = busiest() if lab.world.local_rank == 0 else None
        start, used = time.perf_counter(), time.thread_time()
        seconds = work()
        got = (time.thread_time() - used) / (time.perf_counter() - start)
        gather(lab.world, None)
        return Facts(
            cores=tuple(sorted(os.sched_getaffinity(0))),
            present=os.cpu_count() or 1,
            quota=cpu_quota(),
            threads=int(told) if told.isdecimal() else None,
            seconds=seconds,
            busy=tuple(watch() if watch else ()),
            got=got,
        )

    def judge(self, answers: Mapping[int, Facts], lab: Lab) -> Finding:
        """Look at each node's cores, then compare the times."""
        times = {rank: it.seconds for rank, it in answers.items()}
        # of two ranks the faster one: their mean would hide that the other is slow
        median = statistics.median_low(times.values())
        worst = max(times, key=lambda rank: times[rank])
        found = Finding(
            f"fixed work: median {median * 1e3:.1f} ms, worst {times[worst] * 1e3:.1f} ms "
            f"(rank {worst}), ratio {times[worst] / median:.2f}; each rank had "
            f"{min(it.got for it in answers.values()):.0%} of a core or more"
        )
        for ranks in by_node(lab.roster).values():
            _cores(found, {rank: answers[rank] for rank in ranks if rank in answers}, lab)
        _slow(found, answers, median, lab)
        _remember(answers, lab)
        found.details = {
            "median_seconds": median,
            "worst_seconds": times[worst],
            "worst_rank": worst,
            "ratio": times[worst] / median,
            "seconds": times,
            "shares_of_a_core": {rank: round(it.got, 2) for rank, it in answers.items()},
            "cores": {rank: spans(it.cores) for rank, it in answers.items()},
        }
        labels = [f"rank {rank} ({lab.roster[rank].host})" for rank in sorted(times)]
        values = [times[rank] * 1e3 for rank in sorted(times)]
        found.pictures = [Bars("fixed work of each rank, ms", labels, values)]
        return found


def work() -> float:
    """Return the seconds of the fixed work on one thread, median of several. Local."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        one, times = torch.ones(_SIZE, _SIZE), []
        torch.mm(one, one)
        for _ in range(_TIMES):
            start = time.perf_counter()
            for _ in range(_PRODUCTS):
                torch.mm(one, one)
            times.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    return statistics.median(times)


def cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Return how many cores the container or job may use in the mean, None if all. Local.

    Source: cpu.max of control groups version 2, "MICROSECONDS|max PERIOD".
    """
    try:
        share_, period = (root / "cpu.max").read_text().split()
        return None if share_ == "max" else int(share_) / int(period)
    except (OSError, ValueError):
        return None


def _cores(found: Finding, ranks: Mapping[int, Facts], lab: Lab) -> None:
    """Look at the cores and threads of the ranks of one node."""
    if not ranks:
        return
    _overlaps(found, ranks, lab)
    first = min(ranks)
    host, it = lab.roster[first].host, ranks[first]
    union = set().union(*(one.cores for one in ranks.values()))
    cores = min(float(len(union)), it.quota or float("inf"))
    everyone = [(0, one.cores) for one in ranks.values()]
    fair = {rank: share(everyone, i) for i, rank in enumerate(ranks)}
    threads = sum(one.threads or fair[rank] for rank, one in ranks.items())
    if len(ranks) > cores:
        bound = f" ({spans(union)}) of the {it.present} there" if len(union) < it.present else ""
        found.warn(
            f"{host}: {counted(len(ranks), 'rank')} on {cores:g} core{'s' * (cores != 1)}{bound}",
            f"start at most {max(1, int(cores))} ranks there"
            + ("; or more cores for the job: no taskset around mpirun, srun -c" if bound else ""),
        )
    elif threads > cores:
        found.warn(
            f"{host}: {threads} threads of {counted(len(ranks), 'rank')} on {cores:g} "
            f"core{'s' * (cores != 1)}",
            f"export OMP_NUM_THREADS={max(1, int(cores) // len(ranks))}",
        )


def _remember(answers: Mapping[int, Facts], lab: Lab) -> None:
    """Note which hosts have no core for each rank: what is slow there says nothing of networks."""
    for ranks in by_node(lab.roster).values():
        here = [answers[rank] for rank in ranks if rank in answers]
        if not here:
            continue
        cores = min(float(len({core for it in here for core in it.cores})), here[0].quota or 1e9)
        least = min(it.got for it in here)
        if len(here) > cores:
            lab.crowded[lab.roster[ranks[0]].host] = (
                f"{counted(len(here), 'rank')} on {cores:g} core{'s' * (cores != 1)}"
            )
        elif least < SHARE:
            lab.crowded[lab.roster[ranks[0]].host] = f"a rank had {least:.0%} of a core"


def _overlaps(found: Finding, ranks: Mapping[int, Facts], lab: Lab) -> None:
    """Name ranks that are bound, but to the same cores; unbound ones share all cores rightly."""
    sets = {rank: set(it.cores) for rank, it in ranks.items()}
    union = set().union(*sets.values())
    if all(it == union for it in sets.values()):
        return
    crowded = {
        rank
        for rank, mine in sets.items()
        if sum(not mine.isdisjoint(other) for other in sets.values()) > len(mine)
        or any(mine & other and mine != other for other in sets.values())
    }
    if crowded and len(ranks) > 1:
        cores = set.intersection(*(sets[rank] for rank in crowded)) or sets[min(crowded)]
        found.warn(
            f"{named(crowded, lab.roster)} share core{'s' if len(cores) > 1 else ''} "
            f"{spans(cores)}",
            "mpirun --bind-to core (Open MPI), mpiexec -bind-to core (MPICH), srun "
            "--cpu-bind=cores; and no taskset around mpirun",
        )


def _slow(found: Finding, answers: Mapping[int, Facts], median: float, lab: Lab) -> None:
    """Name a node whose ranks are all slow, and single slow ranks."""
    for ranks in by_node(lab.roster).values():
        here = [rank for rank in ranks if rank in answers]
        slow = [rank for rank in here if answers[rank].seconds > SLOW * median]
        if not slow:
            continue
        host = lab.roster[slow[0]].host
        ratio = max(answers[rank].seconds for rank in slow) / median
        which = f"all ranks of {host}" if len(slow) == len(here) > 1 else named(slow, lab.roster)
        busy = [str(one) for rank in here for one in answers[rank].busy]
        by = f"; busy there: {', '.join(busy)}" if busy else ""
        found.warn(
            f"{which}: {ratio:.1f} times as slow as the median{by}",
            f"ssh {host} top -b -n 1   # another job, a clock that is held down, a weaker CPU",
        )
