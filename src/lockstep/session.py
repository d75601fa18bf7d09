"""Open and close torch.distributed on the world that MPI knows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from lockstep.rendezvous import open_store
from lockstep.world import World, discover


@contextmanager
def session(*, backend: str = "mpi", timeout: timedelta | None = None) -> Iterator[World]:
    """Open torch.distributed for all ranks of the launch, and close it at the end. Collective.

    Rank and world size come from MPI, whatever the backend. "mpi" needs nothing else; for the
    others the ranks meet at a TCP port of the root, announced over MPI.

    Args:
        backend: "mpi", "gloo", "nccl", or a list such as "cpu:mpi,cuda:nccl".
        timeout: limit of a verb; by default that of torch.

    Yields:
        the World of this process.

    Raises:
        LaunchError: on all ranks, if the launch is broken.
    """
    world = discover()
    if backend == "mpi":
        dist.init_process_group("mpi", timeout=timeout)
    else:
        limit = timeout or dist.distributed_c10d.default_pg_timeout
        store = open_store(world, limit)
        dist.init_process_group(
            backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout
        )
    # Not in a finally: after an exception a rank must not wait here for others that cannot come.
    yield world
    dist.destroy_process_group()
