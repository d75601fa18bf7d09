"""Buffers that every rank of a node has in memory that all of them see, and their sum in place.

One fused pass: the ranks meet; each sums its slice over the windows of all and writes the sum into
all of them; they meet again. Nothing is copied in or out, so that a sum costs about as much as one
copy of the buffer. The kernel in C does it, or torch where there is none, to the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lockstep import kernel, notes
from lockstep.ending import within_reason
from lockstep.errors import CollectiveMismatch, CollectiveTimeout, GroupBroken, cure_of_late
from lockstep.meeting import Late, Meeting, MessageMeeting
from lockstep.shared_memory import Segment

if TYPE_CHECKING:
    from mpi4py import MPI  # to import it starts MPI

_LINE = 128


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
        slots = Meeting.bytes_needed(self._library, comm.size) if self._library else 0
        at, places = meetings * slots, []
        for dtype, count in kinds:
            places.append(at)
            at += -(-count * dtype.itemsize // _LINE) * _LINE
        self._segment = Segment(comm, at, purpose)
        self.buffers = [
            self._segment.tensor(comm.rank, dtype, count, place)
            for (dtype, count), place in zip(kinds, places, strict=True)
        ]
        self._meetings: list[Meeting | MessageMeeting] = [
            Meeting.among(comm, self._library, self._segment, number * slots)
            if self._library
            else MessageMeeting(comm)
            for number in range(meetings)
        ]
        halves = self._library and self._library.lockstep_has_float16()
        self._compiled = set(kernel.DTYPES) if self._library else set()
        self._compiled -= set() if all(comm.allgather(bool(halves))) else {torch.float16}
        self._pointers: dict[int, Any] = {}
        self._eager, self._broken = False, ""
        comm.Free()

    def sum(self, piece: torch.Tensor, *, meeting: int = 0, everywhere: bool = True) -> None:
        """Replace a piece of a buffer by its sum over the ranks of the node. Collective.

        Args:
            piece: a slice of one of the buffers; the same slice on all ranks.
            meeting: which of the meetings to use.
            everywhere: give the sum to all ranks; else only the first rank's window gets it.

        Raises:
            CollectiveTimeout: a rank has not come within the limit, or is gone; it is named.
            CollectiveMismatch: the ranks do not sum the same piece.
        """
        targets = self._size if everywhere else 1
        function = self._library.lockstep_windows if self._library else None

        def in_torch() -> None:
            cut = kernel.slice_of(self._rank, self._size, len(piece), piece.element_size())
            kernel.sum_in_torch(self.windows(piece), *cut, targets)

        self._carry_out("sum", piece, meeting, function, in_torch, targets)

    def spread(self, piece: torch.Tensor, *, meeting: int = 0) -> None:
        """Give all ranks what the first rank's window holds of a piece. Collective.

        Args:
            the arguments and errors of `sum`.
        """
        function = self._library.lockstep_spread if self._library else None

        def in_torch() -> None:
            first, *others = self.windows(piece)
            cut = slice(*kernel.slice_of(self._rank, self._size, len(piece), piece.element_size()))
            for window in others:
                window[cut] = first[cut]

        self._carry_out("spread", piece, meeting, function, in_torch)

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
        number: int,
        function: Callable[..., int] | None,
        in_torch: Callable[[], None],
        *rest: int,
    ) -> None:
        what = f"{verb} of {self._purpose} ({len(piece)} x {piece.dtype})"
        if self._broken:
            raise GroupBroken(
                f"{what}: {self._broken}", needed="one that is open", cure="end the job, or reopen"
            )
        if self._size == 1 or not len(piece):
            return
        meeting, at = self._meetings[number], self._place_of(piece)
        # of whole numbers only: the hash of a text is another in every process
        limits = hash((len(verb), at, len(piece))) & (2**62 - 1), self._seconds, self._eager
        try:
            if function is not None and piece.dtype in self._compiled:
                arguments = (self._addresses(at), len(piece), kernel.DTYPES[piece.dtype], *rest)
                assert isinstance(meeting, Meeting)
                same = meeting.call(function, limits[0], 2, *limits[1:], *arguments)
            elif same := meeting.meet(*limits):
                in_torch()
                meeting.meet(*limits)
        except Late as late:
            raise self._late(what, late) from None
        if not same:
            raise self._different(what)

    def _place_of(self, piece: torch.Tensor) -> int:
        return piece.data_ptr() - self._segment.address(self._rank)

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


def _library_of_all(comm: MPI.Intracomm) -> Any:
    """Return the compiled kernel if all ranks have it, else None. Collective."""
    library = kernel.library()
    return library if all(comm.allgather(library is not None)) else None
