"""The ranks of a group that share a node: their verbs through its memory.

What is longer than a place goes block by block, so that the copies stay in the cache.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from mpi4py import MPI

from lockstep import kernel
from lockstep.errors import LockstepError
from lockstep.kernel import SMALL
from lockstep.meeting import Meeting
from lockstep.mpi_backend.agreement import LEFT
from lockstep.shared_memory import Segment
from lockstep.world import current

# What is longer than `SMALL` bytes goes in blocks of so many.
BLOCK = 256 * 2**10


class NodeTeam:
    """The shared memory of one group. Making it is Collective and blocking; use `gather`.

    Every verb first waits until all ranks have come, and compares their signatures; if these differ
    nothing moves and it returns False. A rank that does not come raises `Late`.

    Args:
        comm: the group's communicator, all ranks on one node.
        library: the compiled kernel.

    Attributes:
        dtypes: what it can sum; the same on all ranks.
        size: number of ranks.
        meet: see `Meeting.meet`.
    """

    def __init__(self, comm: MPI.Intracomm, library: Any) -> None:
        self._library = library
        size = comm.size
        # Slots lie together in the first rank's part; then the places, each with two sides.
        slots = Meeting.bytes_needed(library, size)
        self._segment = Segment(comm, slots + 2 * (SMALL + BLOCK), "the mpi backend")
        address = self._segment.address
        self._small = kernel.pointers([address(r, slots) for r in range(size)])
        self._block = kernel.pointers([address(r, slots + 2 * SMALL) for r in range(size)])
        self._meeting = Meeting.among(comm, library, self._segment)
        self.meet, self.size = self._meeting.meet, size
        halves = comm.allgather(bool(library.lockstep_has_float16()))
        self.dtypes = set(kernel.DTYPES) - (set() if all(halves) else {torch.float16})

    def leave(self) -> None:
        """Tell the others that this rank will call nothing any more. Local: waits for nobody."""
        self._meeting.leave(LEFT)

    def leavers(self) -> list[int]:
        """Return the ranks that had left when the last meeting found a difference. Local."""
        return self._meeting.came_with(LEFT)

    def all_reduce(self, signature: int, seconds: float, eager: bool, tensor: torch.Tensor) -> bool:
        """Replace a tensor by its sum over all ranks. Collective.

        Args:
            signature: of the call, a number below 2^63.
            seconds: limit.
            eager: spin before sleeping, if there is a core for every rank.
            tensor: plain memory; float32, float64, bfloat16 or float16.
        """
        nbytes, count = tensor.nbytes, tensor.numel()
        dtype, library = kernel.DTYPES[tensor.dtype], self._library
        if nbytes <= SMALL:
            rest = (self._small, SMALL, tensor.data_ptr(), count, dtype)
            return self._meeting.call(library.lockstep_small, signature, 1, seconds, eager, *rest)
        rest = (self._block, BLOCK, tensor.data_ptr(), count, dtype)
        epochs = -(-nbytes // BLOCK) + 1
        return self._meeting.call(library.lockstep_staged, signature, epochs, seconds, eager, *rest)

    def broadcast(
        self, signature: int, seconds: float, eager: bool, tensor: torch.Tensor, root: int
    ) -> bool:
        """Copy the root's tensor to all ranks. Collective.

        Args:
            tensor: plain memory, any dtype.
            root: its rank.
            the others as for `all_reduce`.
        """
        rest = (self._block, BLOCK, tensor.data_ptr(), tensor.nbytes, root)
        epochs = max(1, -(-tensor.nbytes // BLOCK))
        function = self._library.lockstep_broadcast
        return self._meeting.call(function, signature, epochs, seconds, eager, *rest)

    def all_gather(
        self,
        signature: int,
        seconds: float,
        eager: bool,
        mine: torch.Tensor,
        outputs: Sequence[int],
    ) -> bool:
        """Copy the tensor of rank r to the address outputs[r] on every rank. Collective.

        Args:
            mine: plain memory, any dtype, of as many bytes on all ranks. It may lie at this rank's
                own output, but must not overlap any of them otherwise.
            outputs: addresses of as many bytes each.
            the others as for `all_reduce`.
        """
        nbytes = mine.nbytes
        rest = (self._block, BLOCK, mine.data_ptr(), nbytes, kernel.pointers(outputs))
        epochs = max(1, -(-nbytes // BLOCK))
        function = self._library.lockstep_gather
        return self._meeting.call(function, signature, epochs, seconds, eager, *rest)

    def reduce_scatter(
        self,
        signature: int,
        seconds: float,
        eager: bool,
        whole: torch.Tensor,
        output: torch.Tensor,
    ) -> bool:
        """Leave the r-th part of the sum of whole over all ranks in the output of rank r.

        Collective.

        Args:
            whole: plain memory, as many parts as ranks; a dtype of `dtypes`.
            output: plain memory, one part; it may be this rank's own part of whole, but must not
                overlap it otherwise.
            the others as for `all_reduce`.
        """
        count, width = output.numel(), output.element_size()
        each = BLOCK // self._meeting.size // 64 * 64 // width
        rest = (self._block, BLOCK, whole.data_ptr(), output.data_ptr(), count)
        epochs = max(1, -(-count // each))
        function, dtype = self._library.lockstep_scatter, kernel.DTYPES[output.dtype]
        return self._meeting.call(function, signature, epochs, seconds, eager, *rest, dtype)


def gather(comm: MPI.Intracomm) -> NodeTeam | None:
    """Make the team of a group, if it can have one. Collective over the group, blocking.

    Returns:
        None on all ranks if they are on several nodes, more than 64, without the compiled kernel or
        without memory to share; LOCKSTEP_SHARED=0 says no, too.

    Raises:
        LockstepError: on all ranks, if one of them cannot load its kernel.
    """
    library, trouble = kernel.load()
    wanted = library is not None and os.environ.get("LOCKSTEP_SHARED", "1") != "0"
    # Where each rank is, the world knows. To split the communicator would tell too, but several
    # threads must not make communicators of several groups at once: some MPIs deadlock.
    world = current()
    place = world.node if wanted and world is not None else -1
    everyone = comm.allgather((place, trouble))
    kernel.require([theirs for _, theirs in everyone])
    places = {theirs for theirs, _ in everyone}
    if len(places) != 1 or -1 in places or not 1 < comm.size <= kernel.LARGEST_TEAM:
        return None
    try:
        return NodeTeam(comm, library)
    except LockstepError:
        return None  # raised on all ranks alike; MPI does it more slowly
