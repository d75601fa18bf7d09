"""Opens and closes the default group of one test, over torch's gloo or over our backend."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

GLOO = "gloo"
GLOO_NAME = "gloo-name"
MPI_NAME = "mpi"
MODES = (MPI_NAME, GLOO_NAME, GLOO)

# Tests that cannot run in a mode, with the reason; tests/conformance/README.md lists them, too.
EXCLUDED = {
    GLOO_NAME: {
        "test_ddp_logging_data_cpu": "expects the C++ backend type gloo, and DDP's logger casts "
        "every group of that type to torch's own class, which ends in a segmentation fault; runs "
        "under the name mpi"
    }
}


def torch_name(mode: str) -> str:
    """Tell under which name the suite sees the backend."""
    return MPI_NAME if mode == MPI_NAME else GLOO


def is_ours(mode: str) -> bool:
    """Tell whether the tests run over this project's backend."""
    return mode != GLOO


def register(mode: str) -> None:
    """Make torch use our creator under the name that the mode asks for."""
    if not is_ours(mode):
        return
    import lockstep  # noqa: F401  (the import registers the backend "mpi")

    if mode == GLOO_NAME:
        from lockstep.mpi_backend.register import create_backend

        # The suite keeps many tests for gloo by its name, so ours takes that name. The backend
        # type must not be gloo's: DDP's C++ logger casts whatever has it to torch's own class.
        dist.Backend.register_backend(
            dist.Backend.GLOO,
            create_backend,
            extended_api=True,
            devices=["cpu"],
            _backend_type=dist.ProcessGroup.BackendType.MPI,
        )


def open_default(mode: str, rendezvous: Path, rank: int, size: int, seconds: float) -> None:
    """Open the default group; ``rendezvous`` is a file that no group has used before."""
    timeout = timedelta(seconds=seconds)
    if mode == MPI_NAME:
        dist.init_process_group(MPI_NAME, timeout=timeout)
        return
    dist.init_process_group(
        GLOO, init_method=f"file://{rendezvous}", rank=rank, world_size=size, timeout=timeout
    )


def close_all() -> None:
    """Destroy the default group and every other one, if the test left any."""
    if dist.is_initialized():
        dist.destroy_process_group()
