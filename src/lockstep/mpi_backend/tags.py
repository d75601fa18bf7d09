"""Message tags: which are the user's and which are the backend's own.

MPI guarantees tags up to 32767. The thousand at the upper end of that range are ours on every MPI;
a user's tag from there upwards is moved beyond it, where the MPI allows larger ones.
"""

from __future__ import annotations

from mpi4py import MPI

EXCHANGE = 31_744
# Rounds of a monitored barrier are told apart, so that a message of a rank that came too late for
# one round is not taken for its arrival in the next.
ROUNDS = 500
ARRIVE = 31_745
RELEASE = ARRIVE + ROUNDS
SPLIT = RELEASE + ROUNDS
_END = 32_768


def user_tag(comm: MPI.Intracomm, tag: int) -> int:
    """Return the tag under which a message of the user's travels. Local.

    Raises:
        ValueError: the tag is negative or too large for this MPI.
    """
    if 0 <= tag < EXCHANGE:
        return tag
    largest = (comm.Get_attr(MPI.TAG_UB) or _END) - (_END - EXCHANGE)
    if not 0 <= tag <= largest:
        raise ValueError(
            f"message tag {tag} cannot be sent by this MPI\n"
            f"  needed: a tag from 0 to {largest}\n  to do:  number messages from 0"
        )
    return tag + (_END - EXCHANGE)
