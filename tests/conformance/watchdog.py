"""A limit for each test: a test that hangs is named, its stacks shown, and the job ended."""

from __future__ import annotations

import faulthandler
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mpi4py import MPI

# Exit code of a job that was ended because a test hung.
HUNG = 3
# Between the stacks and the abort, so that no rank is killed before it has shown its own.
GRACE_SECONDS = 3.0


def _stacks() -> str:
    """Return the stacks of all threads of this process."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()


class Watchdog:
    """Guards one test after the other; the whole job ends at the first one that hangs."""

    def __init__(
        self, comm: MPI.Intracomm, limit: float, on_hang: Callable[[str, str], None]
    ) -> None:
        """Allow each test ``limit`` seconds; ``on_hang(test, reason)`` runs before the abort."""
        self.comm = comm
        self.limit = limit
        self.on_hang = on_hang
        self.note = ""

    @contextmanager
    def guard(self, name: str) -> Iterator[None]:
        """Watch the body, which runs the test ``name``."""
        self.note = "still in the test"
        # Rank 0 ends the job, because it holds the results; the others only if it cannot.
        patience = GRACE_SECONDS if self.comm.rank == 0 else 3 * GRACE_SECONDS
        timers = [
            threading.Timer(self.limit, self._show, [name]),
            threading.Timer(self.limit + patience, self._end, [name]),
        ]
        for timer in timers:
            timer.daemon = True
            timer.start()
        # The timers above need the interpreter's lock. Should the test hold it while it hangs,
        # this one, a thread of C, still shows the stacks and ends the process.
        faulthandler.dump_traceback_later(
            self.limit + 4 * GRACE_SECONDS, exit=True, file=sys.__stderr__ or sys.stderr
        )
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            for timer in timers:
                timer.cancel()

    def _show(self, name: str) -> None:
        """Show where this rank is."""
        text = (
            f"== rank {self.comm.rank}: {name} exceeds {self.limit:g} s ({self.note})\n{_stacks()}"
        )
        # A test may have replaced sys.stderr, and what it puts there is lost with the job.
        stream = sys.__stderr__ or sys.stderr
        stream.write(text)
        stream.flush()

    def _end(self, name: str) -> None:
        """Keep what is known and end the job."""
        self.on_hang(name, f"exceeds {self.limit:g} s; rank {self.comm.rank}: {self.note}")
        self.comm.Abort(HUNG)
