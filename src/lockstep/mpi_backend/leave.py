"""Leave MPI in order at the end of the process, whether or not the groups were destroyed."""

from __future__ import annotations

import sys

from lockstep import launch
from lockstep.mpi_backend import attendant


def leave() -> None:
    """Carry out what is queued, stop all threads; called before MPI is finalized. Local.

    A group on which a verb can never end makes an orderly end impossible: MPI_Finalize would wait
    for it. Then the job is ended, with a line that says so.
    """
    stuck = []
    for group in attendant.groups():
        if not group.broken and not group.stop(group.seconds):
            group.break_("a verb did not end before the process did")
        if group.broken:
            stuck.append(group)
    attendant.dismiss()
    for group in stuck:
        sys.stderr.write(f"lockstep: {group.label('leaving')}: {group.broken}: ending the job\n")
    if stuck:
        launch.abort(1)
