"""The ranks of a group that share a node: they meet, and sum, through its memory.

A meeting costs a third of a microsecond where MPI's takes two, and a rank that waits sleeps. See
`_kernel.c` for how it works; here is what surrounds it: memory, limits, signals, dead ranks.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from mpi4py import MPI

from lockstep import kernel
from lockstep.errors import LockstepError
from lockstep.mpi_backend.agreement import LEFT
from lockstep.shared_memory import Segment
from lockstep.world import current

# A message of so many bytes is copied by all ranks at once; longer ones go block by block.
SMALL = 16 * 2**10
BLOCK = 256 * 2**10
# How long one wait in C lasts before Python looks after signals and dead ranks.
_SLICE = 0.1
_SPINS = 3000


class Late(Exception):
    """A rank did not come in time.

    Attributes:
        rank: its number in the group.
        gone: its process has ended.
        met: it had called the verb, and stopped in it.
    """

    def __init__(self, rank: int, gone: bool, met: bool) -> None:
        super().__init__(rank, gone, met)
        self.rank, self.gone, self.met = rank, gone, met


class NodeTeam:
    """The shared memory of one group. Making it is Collective and blocking; use `gather`.

    Args:
        comm: the group's communicator, all ranks on one node.
        library: the compiled kernel.

    Attributes:
        dtypes: what it can sum; the same on all ranks.
    """

    def __init__(self, comm: MPI.Intracomm, library: Any) -> None:
        self._library = library
        self._slot = library.lockstep_slot_bytes()
        size = comm.size
        # Slots lie together in the first rank's part; then the places.
        slots = -(-size * self._slot // 4096) * 4096
        self._segment = Segment(comm, slots + 2 * (SMALL + BLOCK), "the mpi backend")
        address = self._segment.address
        self._small = kernel.pointers([address(r, slots) for r in range(size)])
        self._block = kernel.pointers([address(r, slots + 2 * SMALL) for r in range(size)])
        self._team = kernel.Team(address(0), size, comm.rank, 0, int(_SLICE * 1e9))
        self._at = ctypes.addressof(self._team)
        self._state = (ctypes.c_int64 * 2)()
        self._state_at = ctypes.addressof(self._state)
        self._epoch = 1
        self._eager = _SPINS if _cores_of_all(comm) >= size else 0
        halves = comm.allgather(bool(library.lockstep_has_float16()))
        self.dtypes = set(kernel.DTYPES) - (set() if all(halves) else {torch.float16})
        self._pids = comm.allgather((os.getpid(), _namespace()))

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
        call = self._library.lockstep_meet
        return self._drive(call, signature, 1, seconds, eager)

    def leave(self) -> None:
        """Tell the others that this rank will call nothing any more. Local: waits for nobody."""
        self._state[0] = self._state[1] = 0
        self._team.spins, self._team.nanoseconds = 0, 0
        self._library.lockstep_meet(self._at, self._epoch, LEFT, self._state_at)

    def leavers(self) -> list[int]:
        """Return the ranks that had left when the last meeting found a difference. Local."""
        # struct slot: two words of 32 bits, then the signatures of even and odd epochs
        side = 8 + 8 * ((self._epoch - 1) & 1)
        places = [self._segment.address(0, r * self._slot + side) for r in range(self._team.size)]
        return [r for r, at in enumerate(places) if ctypes.c_int64.from_address(at).value == LEFT]

    def all_reduce(self, signature: int, tensor: torch.Tensor, seconds: float, eager: bool) -> bool:
        """Meet, then replace a tensor by its sum over all ranks. Collective.

        Args:
            tensor: plain memory; float32, float64, bfloat16 or float16.
            the others, the value and errors as for `meet`; if signatures differ nothing is summed.
        """
        nbytes, count = tensor.nbytes, tensor.numel()
        dtype = kernel.DTYPES[tensor.dtype]
        library, data = self._library, tensor.data_ptr()
        if nbytes <= SMALL:
            rest = (self._small, SMALL, data, count, dtype)
            return self._drive(library.lockstep_small, signature, 1, seconds, eager, *rest)
        rest = (self._block, BLOCK, data, count, dtype)
        epochs = -(-nbytes // BLOCK) + 1
        return self._drive(library.lockstep_staged, signature, epochs, seconds, eager, *rest)

    def _drive(
        self,
        call: Callable[..., int],
        signature: int,
        epochs: int,
        seconds: float,
        eager: bool,
        *rest: object,
    ) -> bool:
        """Call a function of the kernel until it is done."""
        state, deadline = self._state, 0.0
        state[0] = state[1] = 0
        self._team.spins = self._eager if eager else 0
        while True:
            late = call(self._at, self._epoch, signature, self._state_at, *rest)
            if late == kernel.DONE:
                self._epoch = (self._epoch + epochs) & 0xFFFFFFFF
                return True
            if late == kernel.DIFFERENT:
                self._epoch = (self._epoch + 1) & 0xFFFFFFFF
                return False
            now = time.monotonic()
            deadline = deadline or now - _SLICE + seconds
            gone = self._is_gone(late)
            if gone or now >= deadline:
                raise Late(late, gone, met=state[1] > 0)

    def _is_gone(self, rank: int) -> bool:
        pid, namespace = self._pids[rank]
        if namespace != self._pids[self._team.rank][1]:
            return False  # its number means nothing here
        try:
            with open(f"/proc/{pid}/stat") as file:
                return file.read().rpartition(")")[2].split()[0] in "ZX"
        except (FileNotFoundError, ProcessLookupError):
            return True
        except OSError:
            return False  # this process has trouble of its own, such as too many open files


def gather(comm: MPI.Intracomm) -> NodeTeam | None:
    """Make the team of a group, if it can have one. Collective over the group, blocking.

    Returns:
        None on all ranks if they are on several nodes, more than 64, without the compiled kernel or
        without memory to share; LOCKSTEP_SHARED=0 says no, too.
    """
    library = kernel.library()
    wanted = library is not None and os.environ.get("LOCKSTEP_SHARED", "1") != "0"
    # Where each rank is, the world knows. To split the communicator would tell too, but several
    # threads must not make communicators of several groups at once: some MPIs deadlock.
    world = current()
    place = world.node if wanted and world is not None else -1
    places = set(comm.allgather(place))
    if len(places) != 1 or -1 in places or not 1 < comm.size <= 64:
        return None
    try:
        return NodeTeam(comm, library)
    except LockstepError:
        return None  # raised on all ranks alike; MPI does it more slowly


def _cores_of_all(comm: MPI.Intracomm) -> int:
    return len(set().union(*comm.allgather(os.sched_getaffinity(0))))


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
