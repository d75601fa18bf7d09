"""Barriers that name the ranks that did not come: by messages, with a limit, never by MPI_Barrier."""

from __future__ import annotations

import time
from collections.abc import Sequence

from mpi4py import MPI

from lockstep.waiting import wait_until


def arrive(
    comm: MPI.Intracomm,
    members: Sequence[int],
    tags: tuple[int, int],
    seconds: float,
    wait_for_all: bool = True,
) -> list[int]:
    """Wait until all members have come. Collective over the members, not over comm.

    The first member collects a message of each other one and answers when it has them all: 2(n-1)
    messages in two steps. That is slower than a dissemination barrier, but one rank knows who is
    missing. A rank that was not answered cannot know, so it names the first member.

    Args:
        comm: carries the messages; other ranks of it need not take part.
        members: ranks of comm, the same list on all of them, this rank among them.
        tags: of the arrivals and of the answers.
        seconds: limit.
        wait_for_all: name all that are missing, not only the first.

    Returns:
        the members that did not come (positions in the list), empty if all did.
    """
    me = comm.rank
    deadline = time.monotonic() + seconds
    if me != members[0]:
        left = comm.Isend([None, 0, MPI.BYTE], members[0], tags[0])
        answer = comm.Irecv([None, 0, MPI.BYTE], members[0], tags[1])
        if _over([left, answer], deadline):
            return []
        _take_back(answer)
        return [0]
    arrivals = [comm.Irecv([None, 0, MPI.BYTE], other, tags[0]) for other in members[1:]]
    if not _over(arrivals, deadline):
        missing = [i for i, arrival in enumerate(arrivals, start=1) if not arrival.Test()]
        for i in missing:
            _take_back(arrivals[i - 1])
        if missing:
            return missing if wait_for_all else missing[:1]
    answers = [comm.Isend([None, 0, MPI.BYTE], other, tags[1]) for other in members[1:]]
    _over(answers, time.monotonic() + seconds)
    return []


def _over(requests: list[MPI.Request], deadline: float) -> bool:
    # Requests that are over become null and count as over when they are tested again.
    return wait_until(lambda: MPI.Request.Testall(requests), deadline - time.monotonic())


def _take_back(request: MPI.Request) -> None:
    if request:
        request.Cancel()
        wait_until(request.Test, 5.0)
