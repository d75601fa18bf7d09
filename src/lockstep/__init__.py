"""Lockstep: PyTorch jobs for HPC clusters, in step over MPI.

Importing this package registers the torch.distributed backend "mpi" and does nothing else: MPI is
started when a world is discovered or a group is opened.
"""

from lockstep.launch import run
from lockstep.mpi_backend.register import register as _register
from lockstep.session import session
from lockstep.world import World, discover

__all__ = ["World", "discover", "run", "session"]

_register()
