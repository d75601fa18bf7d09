"""What the reducing verbs do to a tensor through MPI."""

from __future__ import annotations

import torch
from mpi4py import MPI

from lockstep.mpi_backend.buffers import (
    LARGEST_COUNT,
    flat,
    give_back,
    is_plain,
    memory,
    numbers,
    pieces,
)
from lockstep.mpi_backend.datatypes import Reduction


def reduce_all(comm: MPI.Intracomm, tensor: torch.Tensor, how: Reduction) -> None:
    """Reduce a tensor over all ranks, in place, through MPI. Collective."""
    row = how.arithmetic
    work = tensor if tensor.dtype is row.wire and is_plain(tensor) else flat(tensor).to(row.wire)
    if how.before is not None:
        how.before(work.detach())
    if work.numel() <= LARGEST_COUNT:
        comm.Allreduce(MPI.IN_PLACE, numbers(work, row), how.op)
    else:
        for piece in pieces(work.detach()):
            comm.Allreduce(MPI.IN_PLACE, numbers(piece, row), how.op)
    if how.after is not None:
        how.after(work.detach(), comm.size)
    if work is not tensor:
        give_back(work, tensor)


def scatter_sum(
    comm: MPI.Intracomm, output: torch.Tensor, source: torch.Tensor, how: Reduction
) -> None:
    """Reduce source over all ranks and leave this rank's part of it in output. Collective."""
    parts = source.to(how.arithmetic.wire).view(comm.size, -1)
    if how.before is not None:
        how.before(parts)
    reduced = parts.new_empty(parts.shape[1])
    row = how.arithmetic
    if parts.numel() <= LARGEST_COUNT:
        # Like all of MPI's counts here, that of the input is for one rank.
        sent = [memory(parts), reduced.numel(), row.datatype]
        comm.Reduce_scatter_block(sent, numbers(reduced, row), how.op)
    else:
        for root, part in enumerate(parts):
            for given, kept in zip(pieces(part), pieces(reduced), strict=True):
                target = numbers(kept, row) if comm.rank == root else None
                comm.Reduce(numbers(given, row), target, how.op, root)
    if how.after is not None:
        how.after(reduced, comm.size)
    give_back(reduced, output)
