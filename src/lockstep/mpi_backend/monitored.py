"""Barriers that name the ranks that did not come: by messages, never by MPI_Barrier."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

from lockstep.errors import CollectiveTimeout
from lockstep.waiting import wait_until

# After a cancel the end is near: either the cancel took hold, or the message is there.
_CANCEL = 5.0
_ANSWER = 2.0


def arrive(
    comm: MPI.Intracomm,
    members: Sequence[int],
    tags: tuple[int, int],
    seconds: float,
    wait_for_all: bool = True,
) -> list[int] | None:
    """Wait until all members have come. Collective over the members, not over comm.

    The first member collects a message of each other one, then tells those that came who did not:
    2(n-1) messages in two steps. That is slower than a dissemination barrier, but one rank knows
    who is missing.

    Args:
        comm: carries the messages; other ranks of it need not take part.
        members: ranks of comm, the same list on all of them, this rank among them.
        tags: of the arrivals and of the answers.
        seconds: limit.
        wait_for_all: name all that are missing, not only the first.

    Returns:
        the members that did not come (positions in the list), empty if all did; None if the first
        member itself did not answer.
    """
    if comm.rank != members[0]:
        return _announce(comm, members, tags, seconds)
    arrivals = [comm.Irecv([None, 0, MPI.BYTE], other, tags[0]) for other in members[1:]]
    missing: list[int] = []
    if not wait_until(lambda: MPI.Request.Testall(arrivals), seconds):
        for i, arrival in enumerate(arrivals, start=1):
            if not arrival.Test():
                missing.append(i)
                arrival.Cancel()
                wait_until(arrival.Test, _CANCEL)
    came = [member for i, member in enumerate(members) if i and i not in missing]
    missing = missing if wait_for_all else missing[:1]
    _answer(comm, came, tags[1], missing)
    return missing


def _announce(
    comm: MPI.Intracomm, members: Sequence[int], tags: tuple[int, int], seconds: float
) -> list[int] | None:
    answer, status = np.empty(len(members), dtype=np.int64), MPI.Status()
    both = [comm.Isend([None, 0, MPI.BYTE], members[0], tags[0])]
    both.append(comm.Irecv([answer, MPI.INT64_T], members[0], tags[1]))
    # Those who come at the same time as the first member hear from it when its time is over.
    if not wait_until(lambda: both[0].Test() and both[1].Test(status), seconds + _ANSWER):
        both[1].Cancel()
        wait_until(both[1].Test, _CANCEL)
        return None
    return [int(i) for i in answer[: status.Get_count(MPI.INT64_T)]]


def _answer(comm: MPI.Intracomm, others: Sequence[int], tag: int, missing: list[int]) -> None:
    text = np.array(missing, dtype=np.int64)
    answers = [comm.Isend([text, MPI.INT64_T], other, tag) for other in others]
    wait_until(lambda: MPI.Request.Testall(answers), _CANCEL)


def verdict(name: str, rank: int, missing: list[int] | None, seconds: float) -> CollectiveTimeout:
    """Say who failed to pass a monitored barrier, in the words by which torch's tests know it.

    Args:
        name: the group's name.
        rank: this rank in the group.
        missing: what `arrive` returned.
        seconds: the limit.
    """
    limit = f"{seconds * 1e3:g} ms"
    who = ", ".join(map(str, missing or []))
    several = "s" if missing and len(missing) > 1 else ""
    if rank == 0 and seconds <= 0:
        found = f"[Rank 0]: Rank 0 timed out in monitoredBarrier after {limit}"
    elif rank == 0:
        found = f"[Rank 0]: Rank{several} {who} failed to pass monitoredBarrier in {limit}"
    else:
        reason = f"rank{several} {who} did not come" if missing else "rank 0 did not answer"
        found = (
            f"[Rank {rank}]: Rank {rank} successfully reached monitoredBarrier, but received "
            f"errors while waiting for send/recv from rank 0: {reason} in {limit}"
        )
    return CollectiveTimeout(
        f"{found} (group {name!r})",
        needed="every rank of the group calls monitored_barrier",
        cure=f"look at what rank {who or '0'} prints or does",
    )
