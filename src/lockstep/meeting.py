"""Where the ranks of a node meet: at numbers that each writes into memory that all of them read.

A meeting costs a third of a microsecond where MPI's costs two, and a rank that waits sleeps. How it
works is in `_kernel.c`; here is what surrounds it: limits, signals, dead ranks.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

from lockstep import kernel
from lockstep.shared_memory import Segment
from lockstep.waiting import BACKGROUND, FOREGROUND, wait_until

# How long one wait in C lasts before Python looks after signals and dead ranks.
_SLICE = 0.1
# Looks of an eager wait before it sleeps, if there is a core for every rank, and if there is not.
_SPINS = 3000
_YIELDS = 100


class Late(Exception):
    """A rank did not come in time.

    Attributes:
        rank: its number in the communicator; -1 if it cannot be told.
        gone: its process has ended.
        met: it had come to this call, and stopped in it.
    """

    def __init__(self, rank: int, gone: bool = False, met: bool = False) -> None:
        super().__init__(rank, gone, met)
        self.rank, self.gone, self.met = rank, gone, met


@dataclass(frozen=True)
class Process:
    """A rank as the others of its node can look for it.

    Attributes:
        pid: its number.
        namespace: of processes, in which the number holds; "" if unknown.
        cores: on which it may run.
    """

    pid: int
    namespace: str
    cores: frozenset[int]


def this_process() -> Process:
    """Describe this process. Local."""
    return Process(os.getpid(), _namespace(), frozenset(os.sched_getaffinity(0)))


class Meeting:
    """A place to meet for the ranks of one node. Local: waits for nobody.

    Not thread-safe: one call at a time on a rank.

    Args:
        library: the compiled kernel.
        address: of memory that all of them see, `bytes_needed(…)` of it, zeros, a multiple of 128.
        rank: which of them this process is.
        processes: theirs, in order.

    Attributes:
        size: number of ranks.
        crowded: they outnumber the cores that they may use.
        closed: ends a wait that is under way in another thread.
    """

    def __init__(self, library: Any, address: int, rank: int, processes: Sequence[Process]) -> None:
        self._library, self._rank, self._processes = library, rank, processes
        self.size = len(processes)
        self._team = kernel.Team(address, self.size, rank, 0, 0, int(_SLICE * 1e9))
        self._at = ctypes.addressof(self._team)
        self._state = (ctypes.c_int64 * 2)()
        self._state_at = ctypes.addressof(self._state)
        self._epoch = 1
        cores = frozenset().union(*(process.cores for process in processes))
        self.crowded = len(cores) < self.size
        self._spins, self._yields = (0, _YIELDS) if self.crowded else (_SPINS, 0)
        self.closed = False

    @classmethod
    def among(cls, comm: MPI.Intracomm, library: Any, segment: Segment, offset: int = 0) -> Meeting:
        """Make one for the ranks of a communicator. Collective and blocking.

        Args:
            comm: the ranks.
            library: the compiled kernel.
            segment: memory of these ranks; the first rank's part holds the place to meet.
            offset: where in that part, in bytes.
        """
        processes = comm.allgather(this_process())
        return cls(library, segment.address(0, offset), comm.rank, processes)

    @staticmethod
    def bytes_needed(library: Any, size: int) -> int:
        """Return the memory that a meeting of so many ranks takes, in bytes. Local."""
        return -(-(size + 1) * library.lockstep_slot_bytes() // 4096) * 4096

    def meet(self, signature: int, seconds: float, eager: bool) -> bool:
        """Wait until all ranks have come, and compare their signatures. Collective.

        Args:
            signature: what this rank calls, as a number below 2^63.
            seconds: limit.
            eager: spin before sleeping, if there is a core for every rank.

        Returns:
            whether all signatures are the same.

        Raises:
            Late: a rank did not come.
        """
        return self.call(self._library.lockstep_meet, signature, 1, seconds, eager)

    def call(
        self,
        function: Callable[..., int],
        signature: int,
        epochs: int,
        seconds: float,
        eager: bool,
        *rest: object,
    ) -> bool:
        """Call a function of the kernel until it is done. Collective.

        Args:
            function: of the kernel; it begins with a meeting.
            epochs: how many it takes.
            rest: its arguments after the state.
            the others, the value and errors as for `meet`.
        """
        state, deadline = self._state, 0.0
        state[0] = state[1] = 0
        self.be_eager(eager)
        while True:
            late = function(self._at, self._epoch, signature, self._state_at, *rest)
            if late == kernel.DONE:
                self._epoch = (self._epoch + epochs) & 0xFFFFFFFF
                return True
            if late == kernel.DIFFERENT:
                self._epoch = (self._epoch + 1) & 0xFFFFFFFF
                return False
            now = time.monotonic()
            deadline = deadline or now - _SLICE + seconds
            gone = self._is_gone(late)
            if gone or now >= deadline or self.closed:
                raise Late(late, gone, met=state[1] > 0 or state[0] > 1)

    def be_eager(self, eager: bool) -> None:
        """Say how to wait, also to a wait that is under way in another thread. Local."""
        self._team.spins = self._spins if eager else 0
        self._team.yields = self._yields if eager else 0

    def leave(self, signature: int) -> None:
        """Tell the others that this rank will call nothing any more. Local: waits for nobody.

        Args:
            signature: of no call; see `came_with`.
        """
        self._state[0] = self._state[1] = 0
        self._team.spins, self._team.yields, self._team.nanoseconds = 0, 0, 0
        self._library.lockstep_meet(self._at, self._epoch, signature, self._state_at)

    def close(self, well: bool) -> None:
        """End a wait that is under way in another thread. Local."""
        self.closed = True

    def came_with(self, signature: int) -> list[int]:
        """Return the ranks that came with a signature, when the last meeting differed. Local."""
        everyone = (ctypes.c_int64 * self.size)()
        self._library.lockstep_signatures(self._at, (self._epoch - 1) & 0xFFFFFFFF, everyone)
        return [rank for rank, theirs in enumerate(everyone) if theirs == signature]

    def _is_gone(self, rank: int) -> bool:
        process = self._processes[rank]
        if process.namespace != self._processes[self._rank].namespace:
            return False  # its number means nothing here
        try:
            with open(f"/proc/{process.pid}/stat") as file:
                return file.read().rpartition(")")[2].split()[0] in "ZX"
        except (FileNotFoundError, ProcessLookupError):
            return True
        except OSError:
            return False  # this process has trouble of its own, such as too many open files


class MessageMeeting:
    """The same by messages, for a node without the compiled kernel. Collective and blocking.

    Args:
        comm: the ranks; it is duplicated.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm.Dup()
        self._pair = np.zeros(2, dtype=np.int64)
        self._pending: MPI.Request | None = None
        self.closed = False

    def meet(self, signature: int, seconds: float, eager: bool) -> bool:
        """Wait until all ranks have come; see `Meeting.meet`, but a late rank has no name."""
        # The maximum of x is x, and that of -x is -x, if all say the same.
        self._pair[:] = signature, -signature
        spec = [self._pair, 2, MPI.INT64_T]
        self._pending = self._comm.Iallreduce(MPI.IN_PLACE, spec, MPI.MAX)
        came = wait_until(self._came, seconds, FOREGROUND if eager else BACKGROUND)
        if not came or self.closed:
            raise Late(-1)
        return bool(self._pair[0] == signature and self._pair[1] == -signature)

    def be_eager(self, eager: bool) -> None:
        """Do nothing: `meet` is told. Local."""

    def close(self, well: bool) -> None:
        """End a wait in another thread; if all meetings have ended well, free all. Collective."""
        self.closed = True
        if well:
            self._comm.Free()

    def _came(self) -> bool:
        return self.closed or self._pending is None or self._pending.Test()


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
