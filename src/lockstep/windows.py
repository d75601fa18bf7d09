"""Buffers that every rank of a node has in memory that all of them see, and their sum in place.

One fused pass: the ranks meet; each sums its slice over the windows of all and writes the sum into
all of them; they meet again. Nothing is copied in or out, so that a sum costs about as much as one
copy of the buffer. Of a short piece each puts a copy where all see it; they meet once, and each
adds up all copies. The kernel in C does it, or torch where there is none, to the same bits.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lockstep import kernel, notes
from lockstep.ending import within_reason
from lockstep.errors import CollectiveMismatch, CollectiveTimeout, GroupBroken, cure_of_late
from lockstep.kernel import DTYPES, LARGEST_TEAM, SMALL
from lockstep.meeting import Late, Meeting, MessageMeeting
from lockstep.shared_memory import Segment

if TYPE_CHECKING:
    from mpi4py import MPI  # to import it starts MPI

_LINE = 128
# A function of the kernel, the epochs it takes, its arguments.
_Call = tuple[Callable[..., int], int, tuple[Any, ...]]


class Windows:
    """Flat buffers of the ranks of one node. Making it is Collective and blocking.

    Args:
        comm: ranks of one node, for this object alone; it is freed.
        kinds: dtype and number of elements of each buffer; the same on all ranks.
        purpose: what it is for, for messages.
        names: how to call each rank of comm in messages.
        seconds: limit of a sum.
        meetings: how many threads may use it at a time, each with a meeting of its own.

    Attributes:
        buffers: this rank's, zeros.

    Raises:
        LockstepError: on all ranks, if there is no room for it.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        kinds: Sequence[tuple[torch.dtype, int]],
        *,
        purpose: str,
        names: Sequence[str],
        seconds: float,
        meetings: int = 1,
    ) -> None:
        self._purpose, self._names = purpose, names
        self._seconds = within_reason(seconds)
        self._rank, self._size = comm.rank, comm.size
        self._library = _library_of_all(comm)
        self._pointers: dict[int, Any] = {}
        slots = Meeting.bytes_needed(self._library, comm.size) if self._library else 0
        copies = 2 * SMALL if self._library else 0
        at, places = meetings * (slots + copies), []
        for dtype, count in kinds:
            places.append(at)
            at += -(-count * dtype.itemsize // _LINE) * _LINE
        self._segment = Segment(comm, at, purpose)
        self._base = self._segment.address(comm.rank)
        self.buffers = [
            self._segment.tensor(comm.rank, dtype, count, place)
            for (dtype, count), place in zip(kinds, places, strict=True)
        ]
        self._meetings = [self._make_meeting(comm, n * slots) for n in range(meetings)]
        self._copies = [
            self._addresses(meetings * slots + number * copies) for number in range(meetings)
        ]
        self._compiled = _compiled_of_all(comm, self._library)
        self._short = self._longest_short()
        self._eager, self._broken = False, ""
        comm.Free()
        _open.add(self)

    def sum(self, piece: torch.Tensor, *, meeting: int = 0, everywhere: bool = True) -> None:
        """Replace a piece of a buffer by its sum over the ranks of the node. Collective.

        Args:
            piece: a slice of one of the buffers; the same slice on all ranks.
            meeting: which of the meetings to use.
            everywhere: give the sum to all ranks; else only the first rank's window gets it.

        Raises:
            CollectiveTimeout: a rank has not come within the limit, or is gone; it is named.
            CollectiveMismatch: the ranks do not sum the same piece.
            GroupBroken: an earlier sum did not end, or an exception has left it.
        """
        do: _Call | Callable[[], None]
        count, dtype, library = piece.numel(), piece.dtype, self._library
        address = piece.data_ptr()
        at, targets = address - self._base, self._size if everywhere else 1
        if library is None or dtype not in self._compiled:
            do = functools.partial(self._sum_in_torch, piece, targets)
        elif everywhere and count * dtype.itemsize <= self._short:
            place = (self._copies[meeting], SMALL, address)
            do = (library.lockstep_small, 1, (*place, count, DTYPES[dtype]))
        else:
            do = (library.lockstep_windows, 2, (self._addresses(at), count, DTYPES[dtype], targets))
        self._carry_out("sum", piece, (at, count), meeting, do)

    def spread(self, piece: torch.Tensor, *, meeting: int = 0) -> None:
        """Give all ranks what the first rank's window holds of a piece. Collective.

        Args:
            the arguments and errors of `sum`.
        """
        at, count = self._place_of(piece), piece.numel()
        do: _Call | Callable[[], None]
        if self._library is None or piece.dtype not in self._compiled:
            do = functools.partial(self._spread_in_torch, piece)
        else:
            rest = (self._addresses(at), count, DTYPES[piece.dtype])
            do = (self._library.lockstep_spread, 2, rest)
        self._carry_out("spread", piece, (at, count), meeting, do)

    def windows(self, piece: torch.Tensor) -> list[torch.Tensor]:
        """Return the same piece in the windows of all ranks of the node. Local."""
        at = self._place_of(piece)
        return [
            self._segment.tensor(rank, piece.dtype, len(piece), at) for rank in range(self._size)
        ]

    def be_eager(self, eager: bool) -> None:
        """Say whether somebody waits for the sums, also for those under way. Local.

        Args:
            eager: spin before sleeping, if there is a core for every rank.
        """
        self._eager = eager
        for meeting in self._meetings:
            meeting.be_eager(eager)

    def close(self) -> bool:
        """Let go of the other ranks; the buffers stay as long as they are used. Collective.

        What is under way in other threads ends with an error.

        Returns:
            whether all that was begun has ended well.
        """
        well = not self._broken
        self._broken = self._broken or "it has been closed"
        for meeting in self._meetings:
            meeting.close(well)
        return well

    def _carry_out(
        self,
        verb: str,
        piece: torch.Tensor,
        place: tuple[int, int],
        number: int,
        do: _Call | Callable[[], None],
    ) -> None:
        """Do it by a function of the kernel, the epochs it takes and its arguments; or in torch."""
        if self._broken:
            found = f"{self._called(verb, piece)}: {self._broken}"
            raise GroupBroken(found, needed="one that is open", cure="end the job, or reopen")
        at, count = place
        if self._size == 1 or not count:
            return
        meeting, seconds, eager = self._meetings[number], self._seconds, self._eager
        # of whole numbers only: the hash of a text is another in every process
        signature = hash((len(verb), at, count)) & (2**62 - 1)
        try:
            if isinstance(do, tuple):
                function, epochs, rest = do
                same = meeting.call(function, signature, epochs, seconds, eager, *rest)
            elif same := meeting.meet(signature, seconds, eager):
                do()
                meeting.meet(signature, seconds, eager)
        except Late as late:
            raise self._late(self._called(verb, piece), late) from None
        except BaseException as error:
            # Of a signal handler. The others count on this rank; going on, it would answer the next
            # sum with this one.
            self._broken = f"an earlier sum was left by {type(error).__name__}"
            raise
        if not same:
            raise self._different(self._called(verb, piece))

    def _make_meeting(self, comm: MPI.Intracomm, at: int) -> Any:
        if self._library is None:
            return MessageMeeting(comm)
        return Meeting.among(comm, self._library, self._segment, at)

    def _longest_short(self) -> int:
        """Return up to how many bytes all copies are added up by all, -1 if nothing is."""
        if self._size > LARGEST_TEAM:
            return -1
        # Where ranks are woken, or take turns, one meeting less is worth more work.
        crowded = any(isinstance(it, Meeting) and it.crowded for it in self._meetings)
        return SMALL if crowded else SMALL // 4

    def _sum_in_torch(self, piece: torch.Tensor, targets: int) -> None:
        cut = kernel.slice_of(self._rank, self._size, len(piece), piece.element_size())
        kernel.sum_in_torch(self.windows(piece), *cut, targets)

    def _spread_in_torch(self, piece: torch.Tensor) -> None:
        first, *others = self.windows(piece)
        cut = slice(*kernel.slice_of(self._rank, self._size, len(piece), piece.element_size()))
        for window in others:
            window[cut] = first[cut]

    def _called(self, verb: str, piece: torch.Tensor) -> str:
        return f"{verb} of {self._purpose} ({len(piece)} x {piece.dtype})"

    def _place_of(self, piece: torch.Tensor) -> int:
        return piece.data_ptr() - self._base

    def _addresses(self, at: int) -> Any:
        if at not in self._pointers:
            address = self._segment.address
            self._pointers[at] = kernel.pointers([address(r, at) for r in range(self._size)])
        return self._pointers[at]

    def _late(self, what: str, late: Late) -> CollectiveTimeout:
        notes.explain()  # the verdict first: the error that follows may end the job
        who = self._names[late.rank] if late.rank >= 0 else "some rank"
        self._broken = f"{who} did not come to an earlier sum"
        if late.gone:
            found = f"{what} cannot end: the process of {who} is gone"
        elif late.met:
            found = f"{what} hit its timeout of {self._seconds:g} s: {who} has stopped in it"
        else:
            found = f"{what} hit its timeout of {self._seconds:g} s: {who} has not come"
        return CollectiveTimeout(
            found,
            needed="every rank of the node takes part",
            cure=cure_of_late(gone=late.gone),
        )

    def _different(self, what: str) -> CollectiveMismatch:
        self._broken = "the ranks did not sum the same"
        return CollectiveMismatch(
            f"{what}: not all ranks of the node sum the same piece",
            needed="all ranks take the same steps: backward, step and zero_grad in the same order",
            cure="look for a branch that depends on the rank or on the data before this step",
        )


_open: weakref.WeakSet[Windows] = weakref.WeakSet()


def _after_fork() -> None:
    """Keep a child from taking its parent's place: it has the same memory and the same number."""
    for each in list(_open):
        each._broken = "this process is a fork of the rank that opened it"


os.register_at_fork(after_in_child=_after_fork)


def _library_of_all(comm: MPI.Intracomm) -> Any:
    """Return the compiled kernel if all ranks have it, else None. Collective."""
    library, trouble = kernel.load()
    everyone = comm.allgather((library is not None, trouble))
    kernel.require([theirs for _, theirs in everyone])
    return library if all(found for found, _ in everyone) else None


def _compiled_of_all(comm: MPI.Intracomm, library: Any) -> set[torch.dtype]:
    """Return the dtypes that the kernel can sum on all ranks. Collective."""
    halves = comm.allgather(bool(library and library.lockstep_has_float16()))
    return set(DTYPES if library else ()) - (set() if all(halves) else {torch.float16})
