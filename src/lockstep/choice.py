"""Which all-reduce to take: what a table says that was measured here, else what is built in."""

from __future__ import annotations

import torch

from lockstep import tuning


def choose(
    nbytes: int,
    ranks: int,
    nodes: int,
    dtype: torch.dtype,
    backend: str = "mpi",
    *,
    tuned: bool = True,
) -> str:
    """Return the name of the all-reduce for gradients of so many bytes a piece. Local.

    Args:
        nbytes: length of what is summed at a time.
        ranks: all that take part.
        nodes: on how many nodes they are.
        dtype: of the gradients.
        backend: of the process group.
        tuned: ask the table that was measured on this cluster first, if there is one.
    """
    found = tuning.choose(nbytes, ranks, nodes, dtype, backend) if tuned else None
    if found is not None:
        return found
    if backend == "nccl" or ranks == 1:
        return by_messages(backend)
    return "shared" if nodes == 1 else "hierarchical"


def by_messages(backend: str) -> str:
    """Return the all-reduce for a backend where buffers are nobody's but the caller's. Local."""
    return "ring" if backend == "gloo" else "mpi"
