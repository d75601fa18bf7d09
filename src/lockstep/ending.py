"""End the whole job from wherever a rank is stuck.

Some calls of MPI wait for other ranks inside of C and cannot be left: making a communicator, a
blocking collective. A timer beside them ends the job, with a line that says why, when they outlast
their limit.
"""

from __future__ import annotations

import fcntl
import os
import stat
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from lockstep import notes

# Three years: longer than any job, shorter than what clocks and locks can count.
LONGEST = 1e8
# What follows once all ranks have met is quick, but on a loaded machine it may take seconds; the
# timeout that the ranks had for the meeting may be shorter than that.
SETTLE = 10.0
# What a rank does between its own end and that of MPI, if it is watched.
farewell: Callable[[], None] | None = None
# Seconds that the launcher may take to read what this rank has printed.
_READ = 1.0


def within_reason(seconds: float) -> float:
    """Return a limit that every clock can count. Local.

    A timedelta may be longer; the longest ones overflow in torch and arrive here below zero.
    """
    return seconds if 0 < seconds < LONGEST else LONGEST


def abort(code: int) -> NoReturn:
    """End all ranks of the job now, with a code that is not 0. Local; never returns."""
    flush()
    if notes.current is not None:
        notes.current.set(notes.STATE, notes.GAVE_UP)
    _until_read()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        # An MPI that hangs may hang in its Abort as well; then only the own process is left to us,
        # and the launcher ends the others.
        threading.Thread(target=mpi.COMM_WORLD.Abort, args=(code or 1,), daemon=True).start()
        threading.Event().wait(2.0)
    os._exit(code or 1)


@contextmanager
def within(seconds: float, what: str) -> Iterator[None]:
    """End the job if the body of the ``with`` takes longer. Local.

    Args:
        seconds: the limit.
        what: what the body does, for the line that is printed then.
    """

    def end() -> None:
        sys.stderr.write(
            f"lockstep: {what} did not end within {seconds:g} s: a rank or the network has failed\n"
            "  needed: all ranks of it alive and connected\n"
            "  to do:  look for a stopped process, a dead host or a cut link; the job is ended\n"
        )
        abort(1)

    timer = threading.Timer(within_reason(seconds), end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def flush() -> None:
    """Write out what has been printed. Local."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            # A closed pipe must not keep the job from ending.
            continue


def _until_read() -> None:
    """Give the launcher the time to read what was printed: at an abort MPICH's drops the rest."""
    deadline = time.monotonic() + _READ
    while any(map(_unread, (1, 2))) and time.monotonic() < deadline:
        time.sleep(0.005)


def _unread(stream: int) -> int:
    """Return how many bytes of an open file nobody has read yet; 0 if it is not a pipe."""
    count = bytearray(4)
    try:
        if stat.S_ISFIFO(os.fstat(stream).st_mode):
            fcntl.ioctl(stream, termios.FIONREAD, count)
    except OSError:
        return 0
    return int.from_bytes(count, sys.byteorder)
