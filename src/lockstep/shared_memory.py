"""Memory that the ranks of a node share.

One segment a purpose. It is a file in /dev/shm that has lost its name before anybody uses it: when
the last process that maps it ends, however it ends, the memory is gone, and nothing is left behind.
That is why it is not MPI's own window, whose file some MPIs leave after a SIGKILL, and whose end is
a barrier.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
from pathlib import Path

import torch
from mpi4py import MPI

from lockstep.errors import LockstepError

_DIRECTORY = "/dev/shm"
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
        descriptor, trouble = -1, ""
        path, note = comm.bcast(_create(total) if comm.rank == 0 else None, root=0)
        if path:
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            except OSError as error:
                trouble = f"rank {comm.rank} cannot open {path}: {error.strerror}"
        troubles = [text for text in (note, *comm.allgather(trouble)) if text]
        if path and comm.rank == 0:
            os.unlink(path)  # all who will ever open it have done so
        if troubles:
            if descriptor >= 0:
                os.close(descriptor)
            raise LockstepError(
                f"no memory to share for {purpose} ({total >> 10} KiB on a node): {troubles[0]}",
                needed=f"so much room in {_DIRECTORY}, which all ranks of a node see",
                cure=f"df -h {_DIRECTORY}; in a container: --shm-size=1g, or --ipc=host",
            )
        self._map = mmap.mmap(descriptor, total)
        os.close(descriptor)
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


def _create(total: int) -> tuple[str, str]:
    """Make the file, and claim its memory: a full tmpfs would kill by SIGBUS at the first touch."""
    path = ""
    try:
        descriptor, path = tempfile.mkstemp(prefix="lockstep-", dir=_DIRECTORY)
        try:
            os.posix_fallocate(descriptor, 0, total)
        finally:
            os.close(descriptor)
    except OSError as error:
        if path:
            Path(path).unlink(missing_ok=True)
        full = error.errno in (errno.ENOSPC, errno.ENOMEM)
        return "", f"{_DIRECTORY} has no room left" if full else f"{error.strerror}"
    return path, ""
