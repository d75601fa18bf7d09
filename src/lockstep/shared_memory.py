"""Memory that the ranks of a node share.

One segment a purpose. It is a file in memory that never has a name: the others open it through the
process that made it. When the last process that maps it ends, however it ends, the memory is gone,
and nothing is left behind. That is why it is not MPI's own window, whose file some MPIs leave after
a SIGKILL, and whose end is a barrier. The size of /dev/shm does not limit it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os

import torch
from mpi4py import MPI

from lockstep.errors import LockstepError

_PAGE = mmap.PAGESIZE


class Segment:
    """Equal parts of memory for the ranks of a communicator, which all of them can reach.

    Making it is Collective and blocking: the ranks must have met before. Each rank touches its own
    part first, so that its pages lie near its core.

    Args:
        comm: ranks of one node.
        each: bytes of a rank's part; rounded up to whole pages.
        purpose: what it is for, for messages.

    Raises:
        LockstepError: on all ranks, if there is no room for it, or it cannot be shared.
    """

    def __init__(self, comm: MPI.Intracomm, each: int, purpose: str) -> None:
        self.each = -(-max(each, 1) // _PAGE) * _PAGE
        self.size, self.rank = comm.size, comm.rank
        total = self.each * comm.size
        descriptor, trouble = _create(total, purpose) if comm.rank == 0 else (-1, "")
        path = comm.bcast(f"/proc/{os.getpid()}/fd/{descriptor}", root=0)
        mapped: mmap.mmap | None = None
        try:
            if comm.rank != 0:
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            mapped = mmap.mmap(descriptor, total) if descriptor >= 0 else None
        except (OSError, ValueError) as error:
            trouble = f"rank {comm.rank} cannot map {path}: {error}"
        # The root keeps its descriptor until all have said that they opened it.
        troubles = [text for text in comm.allgather(trouble) if text]
        if descriptor >= 0:
            os.close(descriptor)
        if troubles or mapped is None:
            raise LockstepError(
                f"no memory to share for {purpose} ({total >> 10} KiB on a node): {troubles[:1]}",
                needed="so much free memory, and ranks of a node that see each other's /proc",
                cure="free -m; in containers: one for all ranks of a node, or --pid=host",
            )
        self._map = mapped
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        ctypes.memset(self.address(self.rank), 0, self.each)
        comm.Barrier()  # nobody reads a part that its rank has not cleared yet

    def address(self, rank: int, offset: int = 0) -> int:
        """Return where a rank's part begins in this process, plus offset bytes. Local."""
        return self._base + rank * self.each + offset

    def tensor(self, rank: int, dtype: torch.dtype, count: int, offset: int = 0) -> torch.Tensor:
        """Return a flat tensor over a rank's part. Local. It keeps the memory alive.

        Args:
            rank: whose part.
            dtype: of the tensor.
            count: number of elements.
            offset: bytes from the beginning of the part.
        """
        start = rank * self.each + offset
        if not count:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=start)


def _create(total: int, purpose: str) -> tuple[int, str]:
    """Make the file, and claim its memory: the first touch of what is not there kills by SIGBUS.

    Returns:
        its descriptor and no trouble, or -1 and what the trouble is.
    """
    descriptor = -1
    try:
        descriptor = os.memfd_create(f"lockstep: {purpose}", os.MFD_CLOEXEC)
        os.posix_fallocate(descriptor, 0, total)
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        full = error.errno in (errno.ENOSPC, errno.ENOMEM)
        return -1, "no memory is left" if full else str(error.strerror)
    return descriptor, ""
