"""Make ``init_process_group("mpi")`` mean this backend.

torch keeps one creator for each backend's name. Ours replaces the one that says that torch was
built without MPI. It imports MPI only when a group is made. A torch that was built with MPI is
left as it is.
"""

from __future__ import annotations

import atexit
import functools
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from lockstep.mpi_backend.backend import MPIBackend


def register() -> bool:
    """Register the backend under the name "mpi". Local; does not import MPI.

    Returns:
        False if this torch was built with MPI, or without distributed: nothing is changed then.
    """
    import torch.distributed as dist

    if not dist.is_available() or dist.is_mpi_available():
        return False
    from lockstep.mpi_backend import torch_gaps

    dist.Backend.register_backend(
        "mpi",
        cast("Any", create_backend),  # a backend of Python's is no subclass in torch's stubs
        extended_api=True,
        devices=["cpu"],
        _backend_type=dist.ProcessGroup.BackendType.MPI,
    )
    torch_gaps.close()
    return True


@functools.cache
def _leave_in_order() -> None:
    """See to it that groups are left before MPI, started by now, is finalized. Local."""
    from lockstep.mpi_backend.leave import leave

    atexit.register(leave)


def create_backend(options: Any, backend_options: object = None) -> MPIBackend:
    """Make the backend of one group, as torch asks for it. Collective over the group's members.

    Args:
        options: torch's description of the group: its ranks (none: all), name and timeout; group
            rank and size where torch knows them.
        backend_options: not used.

    Raises:
        LaunchError: the ranks are not one world, or not the one that torch was told.
    """
    from lockstep import launch
    from lockstep.ending import within_reason
    from lockstep.errors import LaunchError
    from lockstep.mpi_backend.backend import MPIBackend
    from lockstep.mpi_backend.open import open_communicator
    from lockstep.world import discover

    world = discover()
    launch.die_together()
    _leave_in_order()
    ranks = list(options.global_ranks_in_group) or list(range(world.size))
    rank = ranks.index(world.rank) if world.rank in ranks else -1
    told = (options.group_rank, options.group_size)
    if told not in ((-1, -1), (rank, len(ranks))):
        raise LaunchError(
            f"torch was told rank {told[0]} of {told[1]}, MPI says rank {rank} of {len(ranks)}",
            needed="the rank and world size of the MPI launch",
            cure='init_process_group("mpi") needs neither; with "cpu:mpi" pass those of '
            "lockstep.discover(), and start all ranks by one mpirun or srun",
        )
    seconds = within_reason(options.timeout.total_seconds())
    comm = open_communicator(world.comm, ranks, options.group_id, seconds)
    return MPIBackend(comm, options.group_id, options.timeout)
