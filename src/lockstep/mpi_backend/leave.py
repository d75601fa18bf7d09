"""Leave MPI in order at the end of the process, whether or not the groups were destroyed."""

from __future__ import annotations

import faulthandler

from lockstep import launch
from lockstep.mpi_backend import attendant

# MPI_Finalize itself takes a second or two on a loaded machine.
_AT_LEAST = 30.0


def leave() -> None:
    """Carry out what is queued, stop all threads; called before MPI is finalized. Local.

    MPI_Finalize waits for the other ranks. Where a verb has timed out, the ranks no longer agree on
    what they do, and one of them may never come: then the wait gets the limit that the verb had,
    or half a minute if that was shorter.
    """
    if attendant.forked():
        return  # MPI is the parent's
    if launch.failed():
        return  # the job is about to be ended
    for group in attendant.groups():
        if not group.broken and not group.stop(group.seconds):
            group.break_("a verb did not end before the process did")
        elif not group.broken:
            group.tell_leaving()
    attendant.dismiss()
    limits = [group.seconds for group in attendant.groups() if group.broken]
    if limits:
        # In C, because MPI_Finalize holds the interpreter's lock.
        faulthandler.dump_traceback_later(max(_AT_LEAST, *limits), exit=True, file=2)
