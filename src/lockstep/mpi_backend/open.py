"""Open a communicator for some ranks of another one: they alone take part."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from mpi4py import MPI

from lockstep.ending import SETTLE, within
from lockstep.errors import CollectiveTimeout
from lockstep.mpi_backend.monitored import arrive

# Groups opened at the same time by different ranks are told apart by their tags.
_TAGS = 15_000


def open_communicator(
    parent: MPI.Intracomm,
    ranks: Sequence[int],
    name: str,
    seconds: float,
    tags: tuple[int, int] | None = None,
) -> MPI.Intracomm:
    """Make a communicator of the given ranks of parent, in that order. Collective over them.

    Making it is a blocking call without a limit, so the ranks first wait for each other with one.

    Args:
        parent: carries the messages.
        ranks: ranks of parent; this rank is among them.
        name: the same on all of them; another name is another group.
        seconds: limit.
        tags: two tags that nobody else uses on parent; by default two made of the name.

    Raises:
        CollectiveTimeout: naming the ranks that did not come.
    """
    number = zlib.crc32(f"{name}:{list(ranks)}".encode()) % _TAGS
    tags = tags or (2 * number, 2 * number + 1)
    missing = arrive(parent, ranks, tags, seconds)
    if missing is None or missing:
        who = ", ".join(str(ranks[i]) for i in missing or [0])
        raise CollectiveTimeout(
            f"opening group {name!r} of {len(ranks)} ranks timed out after {seconds:g} s on rank "
            f"{parent.rank}: no message from rank {who}",
            needed="every rank of the group opens it (init_process_group, new_group)",
            cure=f"look at what rank {who} prints or does",
        )
    with within(seconds + SETTLE, f"making group {name!r} of {len(ranks)} ranks"):
        return _create(parent, ranks, tags[0])


def _create(parent: MPI.Intracomm, ranks: Sequence[int], tag: int) -> MPI.Intracomm:
    everyone = parent.Get_group()
    members = everyone.Incl(list(ranks))
    try:
        comm = parent.Create_group(members, tag)
    finally:
        members.Free()
        everyone.Free()
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    return comm
