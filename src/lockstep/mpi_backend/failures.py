"""What went wrong with a verb, in words; each breaks the group it went wrong on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpi4py import MPI

from lockstep import notes
from lockstep.errors import CollectiveMismatch, CollectiveTimeout, MPIFailure, cure_of_late
from lockstep.meeting import Late
from lockstep.mpi_backend.agreement import Plan

if TYPE_CHECKING:
    from lockstep.mpi_backend.group import Group


def deserted(group: Group, verb: str, plan: Plan, left: list[int]) -> CollectiveMismatch:
    """Break a group that ranks have left, and return the error. Local."""
    notes.explain()
    who = ", ".join(map(str, left))
    group.break_(f"rank {who} has left it")
    return CollectiveMismatch(
        f"{group.label(plan.describe(verb, group.sequence))} cannot end: rank {who} has left the "
        "group: it has closed it, or its program has ended",
        needed="all ranks of a group call the same verbs before they leave",
        cure=f"look for a return, an exit or a shorter loop on rank {who}",
    )


def late_error(
    group: Group, verb: str, plan: Plan, seconds: float, late: Late | None = None
) -> CollectiveTimeout:
    """Break a group on which a rank is late, and return the error, after the verdict. Local."""
    what = group.label(plan.describe(verb, group.sequence))
    # The verdict first: the error that follows may end the job on all ranks.
    notes.explain()
    group.break_(f"{verb} #{group.sequence} timed out")
    if late is not None and late.gone:
        found = f"{what} cannot end: the process of rank {late.rank} is gone"
    elif late is not None and late.met:
        found = f"{what} hit its timeout of {seconds:g} s: rank {late.rank} has stopped in it"
    else:
        who = "not all ranks of the group have" if late is None else f"rank {late.rank} has not"
        found = f"{what} hit its timeout of {seconds:g} s: {who} called it"
    return CollectiveTimeout(
        found,
        needed="every rank of the group calls this verb",
        cure=cure_of_late(gone=late is not None and late.gone),
    )


def mpi_failure(group: Group, what: str, error: MPI.Exception) -> MPIFailure:
    """Break a group on which MPI has failed, and return the error. Local."""
    text = group.label(f"{what} #{group.sequence}")
    group.break_(f"{what} failed in MPI")
    return MPIFailure(
        f"{text} failed: MPI says: {error.Get_error_string()}",
        needed="a working MPI between all ranks of the group",
        cure="run `mpirun … python jobs/ptdist.py` on the same hosts to see whether MPI works",
    )
