"""The torch.distributed backend "mpi", over mpi4py, for torch as pip installs it."""

from lockstep.mpi_backend.register import create_backend, register

__all__ = ["create_backend", "register"]
