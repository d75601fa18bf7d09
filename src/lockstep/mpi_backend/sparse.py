"""The sum of sparse tensors: gathered, not reduced, since MPI knows no sparse layout."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from mpi4py import MPI
from torch.distributed import ReduceOp

from lockstep.mpi_backend.agreement import Plan
from lockstep.mpi_backend.buffers import memory
from lockstep.mpi_backend.datatypes import DTYPE_CODES, Operator, reduction


def all_reduce(comm: MPI.Intracomm, tensors: Sequence[torch.Tensor], op: Operator) -> Plan:
    """Plan to replace a sparse COO tensor by its sum over all ranks. Local.

    Every rank receives the entries of all ranks and adds them up in the order of the ranks, so
    that all get the same bits. Ranks may have different numbers of entries.
    """
    tensor = tensors[0]
    if tensor.layout is not torch.sparse_coo or not tensor.is_cpu:
        raise TypeError(
            f"all_reduce of a {tensor.layout} tensor on {tensor.device} as sparse\n"
            "  needed: a sparse COO tensor on the CPU\n  to do:  tensor.to_sparse_coo().cpu()"
        )
    if op.op != ReduceOp.SUM:
        raise TypeError(
            f"the mpi backend cannot apply ReduceOp.{op.op.name} to sparse tensors\n"
            "  needed: ReduceOp.SUM\n  to do:  tensor.to_dense() first"
        )
    reduction(tensor.dtype, op)

    def move() -> None:
        mine = tensor.detach().coalesce()
        indices = _gather_columns(comm, mine.indices().t().contiguous())
        values = _gather_columns(comm, mine.values().contiguous())
        total = torch.sparse_coo_tensor(indices.t(), values, tensor.shape).coalesce()
        # detach() of a sparse tensor does not share what copy_ would change.
        with torch.no_grad():
            tensor.copy_(total)

    shape = (*tensor.shape, tensor.sparse_dim(), DTYPE_CODES[tensor.dtype])
    return Plan(shape, move, [], f"sparse {tensor.dtype}{list(tensor.shape)}", [tensor])


def _gather_columns(comm: MPI.Intracomm, mine: torch.Tensor) -> torch.Tensor:
    """Join the rows of all ranks, in order; each rank may have another number of them."""
    rows = np.empty(comm.size, dtype=np.int64)
    comm.Allgather([np.array([len(mine)], dtype=np.int64), MPI.INT64_T], [rows, MPI.INT64_T])
    whole = mine.new_empty((int(rows.sum()), *mine.shape[1:]))
    a_row = whole[:1].nbytes if len(whole) else 0
    counts = [int(n) * a_row for n in rows]
    comm.Allgatherv([memory(mine), mine.nbytes, MPI.BYTE], [memory(whole), counts, MPI.BYTE])
    return whole
