"""The torch.distributed backend "mpi", over mpi4py, for torch as pip installs it."""

from lockstep.mpi_backend.register import autoload, create_backend, register

__all__ = ["autoload", "create_backend", "register"]
