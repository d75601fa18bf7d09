"""Memory that the ranks of a node share.

One segment a purpose. It is a file in memory that never has a name: the others open it through the
process that made it. When the last process that maps it ends, however it ends, the memory is gone,
and nothing is left behind. That is why it is not MPI's own window, whose file some MPIs leave after
a SIGKILL, and whose end is a barrier. The size of /dev/shm does not limit it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from pathlib import Path

import torch
from mpi4py import MPI

from lockstep.errors import LockstepError

_PAGE = mmap.PAGESIZE
_CGROUPS = Path("/sys/fs/cgroup")


class Segment:
    """Equal parts of memory for the ranks of a communicator, which all of them can reach.

    Making it is Collective and blocking: the ranks must have met before.

    Args:
        comm: ranks of one node.
        each: bytes of a rank's part; rounded up to whole pages.
        keep: keep the descriptor of the file.
        purpose: what it is for, for messages.

    Attributes:
        descriptor: of the file, where it was asked for; whoever has it may map the memory too.

    Raises:
        LockstepError: on all ranks, if there is no room for it, or it cannot be shared.
    """

    def __init__(self, comm: MPI.Intracomm, each: int, purpose: str, *, keep: bool = False) -> None:
        self.each = -(-max(each, 1) // _PAGE) * _PAGE
        self.size, self.rank = comm.size, comm.rank
        total = self.each * comm.size
        descriptor, trouble = _create(total, purpose) if comm.rank == 0 else (-1, "")
        path = comm.bcast(f"/proc/{os.getpid()}/fd/{descriptor}" if not trouble else "", root=0)
        mapped: mmap.mmap | None = None
        try:
            if comm.rank != 0 and path:
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            if path:
                # The memory is claimed, since the first touch of what is not there would kill by
                # SIGBUS; each rank claims its own part, so that its pages lie near its core.
                os.posix_fallocate(descriptor, self.rank * self.each, self.each)
                mapped = mmap.mmap(descriptor, total)
        except (OSError, ValueError) as error:
            trouble = f"rank {comm.rank} cannot map it: {_why(error)}"
        # The root keeps its descriptor until all have said that they opened it.
        everyone = comm.allgather((trouble, self.each))
        troubles = [text for text, _ in everyone if text]
        self.descriptor = os.dup(descriptor) if keep and descriptor >= 0 else -1
        if descriptor >= 0:
            os.close(descriptor)
        _require_equal([each for _, each in everyone], purpose)
        if troubles or mapped is None:
            raise LockstepError(
                f"no memory to share for {purpose} ({total >> 10} KiB on a node): {troubles[0]}",
                needed="so much free memory, and ranks of a node that see each other's /proc",
                cure="free -m, ulimit -a; in containers: one for all ranks, or --pid=host",
            )
        self._map = mapped
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        # Pages that are there still have to be entered in this process's tables: now, not in the
        # first step.
        ctypes.memset(self.address(self.rank), 0, self.each)
        comm.Barrier()  # nobody writes to a part that its rank has not cleared yet

    def address(self, rank: int, offset: int = 0) -> int:
        """Return where a rank's part begins in this process, plus offset bytes. Local."""
        return self._base + rank * self.each + offset

    def part(self, rank: int) -> memoryview:
        """Return a rank's part as bytes. Local. It keeps the memory alive."""
        return memoryview(self._map)[rank * self.each : (rank + 1) * self.each]

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


def _require_equal(sizes: list[int], purpose: str) -> None:
    if len(set(sizes)) > 1:
        raise LockstepError(
            f"the ranks of a node want to share memory of different sizes for {purpose}: "
            f"{', '.join(map(str, sizes))} bytes",
            needed="the same buffers, in the same order, on all ranks",
            cure="look for a size that depends on the rank",
        )


def _create(total: int, purpose: str) -> tuple[int, str]:
    """Make the file, if the node has room for it.

    Returns:
        its descriptor and no trouble, or -1 and what the trouble is.
    """
    # To ask for more than there is does not fail: it wakes the killer of processes.
    room = _room()
    if total > room:
        return -1, f"only {room >> 10} KiB of memory are left"
    descriptor = -1
    try:
        descriptor = os.memfd_create(f"lockstep: {purpose}", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, total)
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        return -1, _why(error)
    return descriptor, ""


def _why(error: Exception) -> str:
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOSPC, errno.ENOMEM):
        return "no memory is left"
    return os.strerror(number) if number else str(error)


def _room() -> int:
    """Return how many bytes this process may still claim: of the machine, and of its cgroups."""
    room = 2**62
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        room = int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) << 10
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        own = next(line for line in lines if line.startswith("0::"))[3:]
        place = _CGROUPS / own.lstrip("/")
        while place.is_relative_to(_CGROUPS):
            room = min(room, _room_in(place))
            place = place.parent
    return room


def _room_in(place: Path) -> int:
    """Return what is left of the limit of a cgroup (version 2); what is cached counts as free."""
    try:
        limit = int((place / "memory.max").read_text())  # the word "max" is no number
        used = int((place / "memory.current").read_text())
        words = (place / "memory.stat").read_text().split()
        cached = int(words[words.index("inactive_file") + 1])
    except (OSError, ValueError):
        return 2**62
    return max(limit - used + cached, 0)
