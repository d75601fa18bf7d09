"""All-to-all: every rank sends a part of its own to every other rank."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from mpi4py import MPI

from lockstep.errors import CollectiveMismatch
from lockstep.mpi_backend.agreement import Plan
from lockstep.mpi_backend.arguments import one_a_rank
from lockstep.mpi_backend.buffers import (
    LARGEST_COUNT,
    blocks,
    check,
    check_written,
    flat,
    give_back,
    memory,
)
from lockstep.mpi_backend.datatypes import DTYPE_CODES
from lockstep.mpi_backend.tags import EXCHANGE


def all_to_all(
    comm: MPI.Intracomm, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> Plan:
    """Plan to copy inputs[r] into the outputs[own rank] of rank r, for all r. Local.

    Sizes may differ from pair to pair; both sides of a pair must agree.
    """
    check([*outputs, *inputs])
    check_written(outputs)
    one_a_rank(outputs, comm.size, "output")
    one_a_rank(inputs, comm.size, "input")
    if len({tensor.dtype for tensor in (*outputs, *inputs)}) != 1:
        raise ValueError(
            "the tensors of an all_to_all have different dtypes\n"
            "  needed: one dtype\n  to do:  convert them first"
        )

    def move() -> None:
        sent = torch.cat([flat(tensor).view(-1) for tensor in inputs])
        received = sent.new_empty(sum(tensor.numel() for tensor in outputs))
        taken = [tensor.nbytes for tensor in outputs]
        exchange(comm, sent, [tensor.nbytes for tensor in inputs], received, taken)
        parts = received.split([tensor.numel() for tensor in outputs])
        for target, part in zip(outputs, parts, strict=True):
            give_back(part, target)

    return Plan((DTYPE_CODES[inputs[0].dtype],), move, list(inputs), result=list(outputs))


def all_to_all_single(
    comm: MPI.Intracomm,
    output: torch.Tensor,
    whole: torch.Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
) -> Plan:
    """Plan to send the r-th part of whole to rank r, and to put its part in output. Local.

    Args:
        output: receives the parts of all ranks, in order, along dimension 0.
        whole: the parts for all ranks, in order, along dimension 0.
        output_splits: rows that come from each rank; empty means equal parts.
        input_splits: rows that go to each rank; empty means equal parts.
    """
    check([output, whole])
    check_written([output])
    if output.dtype is not whole.dtype:
        raise ValueError(
            f"all_to_all_single from {whole.dtype} to {output.dtype}\n"
            "  needed: one dtype\n  to do:  convert one of them first"
        )
    given = _bytes_a_rank(whole, input_splits, comm.size, "input")
    taken = _bytes_a_rank(output, output_splits, comm.size, "output")

    def move() -> None:
        received = flat(output)
        sent = flat(whole)
        exchange(comm, sent, given, received, taken)
        give_back(received, output)

    return Plan((DTYPE_CODES[whole.dtype],), move, [whole], f"splits {given}", output)


def exchange(
    comm: MPI.Intracomm,
    sent: torch.Tensor,
    given: Sequence[int],
    received: torch.Tensor,
    taken: Sequence[int],
) -> None:
    """Exchange bytes between all pairs of ranks. Collective.

    Args:
        sent: contiguous; given[r] bytes of it go to rank r, in order.
        received: contiguous; taken[r] bytes of it come from rank r, in order.
    """
    largest = _compare(comm, given, taken)
    starts_out = [0, *accumulate(given)]
    starts_in = [0, *accumulate(taken)]
    if largest <= LARGEST_COUNT:
        comm.Alltoallv(
            [memory(sent), (list(given), starts_out[:-1]), MPI.BYTE],
            [memory(received), (list(taken), starts_in[:-1]), MPI.BYTE],
        )
        return
    _by_messages(comm, (sent, given, starts_out), (received, taken, starts_in))


def _compare(comm: MPI.Intracomm, given: Sequence[int], taken: Sequence[int]) -> int:
    """Check that what each rank gives is what the others expect; return the largest total.

    Every rank must take the same way afterwards, so it is chosen by what the largest holds.
    """
    offered = np.empty(comm.size, dtype=np.int64)
    comm.Alltoall([np.array(given, dtype=np.int64), MPI.INT64_T], [offered, MPI.INT64_T])
    wrong = np.flatnonzero(offered != np.array(taken, dtype=np.int64))
    verdict = np.array([max(sum(given), sum(taken)), -comm.size], dtype=np.int64)
    if wrong.size:
        verdict[1] = -comm.rank
    comm.Allreduce(MPI.IN_PLACE, [verdict, MPI.INT64_T], MPI.MAX)
    if verdict[1] == -comm.size:
        return int(verdict[0])
    first = -int(verdict[1])
    detail = ""
    if wrong.size and first == comm.rank:
        other = int(wrong[0])
        detail = f": {taken[other]} bytes from rank {other}, which gives {offered[other]}"
    detail = comm.bcast(detail, root=first)
    raise CollectiveMismatch(
        f"the parts of an all-to-all do not fit: rank {first} expects{detail or ' others'}",
        needed="what rank r gives to rank s is as large as what s expects of r",
        cure="compare the input splits of one rank with the output splits of the other",
    )


_Side = tuple[torch.Tensor, Sequence[int], Sequence[int]]


def _by_messages(comm: MPI.Intracomm, out: _Side, into: _Side) -> None:
    """Do what Alltoallv cannot: its displacements are C ints and overflow at 2 GiB."""
    for distance in range(comm.size):
        to, source = (comm.rank + distance) % comm.size, (comm.rank - distance) % comm.size
        sent, received = _part(out, to), _part(into, source)
        with blocks(received.nbytes) as (count, kind):
            arrival = comm.Irecv([memory(received), count, kind], source, EXCHANGE)
            with blocks(sent.nbytes) as (sent_count, sent_kind):
                comm.Send([memory(sent), sent_count, sent_kind], to, EXCHANGE)
            arrival.Wait()


def _part(side: _Side, rank: int) -> torch.Tensor:
    tensor, sizes, starts = side
    return tensor.view(-1).view(torch.uint8)[starts[rank] : starts[rank] + sizes[rank]]


def _bytes_a_rank(tensor: torch.Tensor, splits: Sequence[int], size: int, what: str) -> list[int]:
    rows = tensor.shape[0] if tensor.dim() else 1
    if not splits:
        if rows % size:
            raise ValueError(
                f"dimension 0 of the {what} has {rows} rows and does not divide equally across "
                f"the {size} ranks of the group\n"
                f"  needed: a multiple of {size}\n  to do:  pad, or pass {what}_split_sizes"
            )
        splits = [rows // size] * size
    elif len(splits) != size or sum(splits) != rows or min(splits) < 0:
        raise ValueError(
            f"{what}_split_sizes {list(splits)} do not fit {rows} rows and {size} ranks\n"
            f"  needed: {size} numbers, none below 0, that sum up to {rows}\n"
            f"  to do:  count the rows for each rank again"
        )
    a_row = tensor.nbytes // rows if rows else 0
    return [split * a_row for split in splits]
