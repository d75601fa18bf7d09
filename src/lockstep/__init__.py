"""Lockstep: PyTorch jobs for HPC clusters, in step over MPI.

Importing this package registers the torch.distributed backend "mpi" and does nothing else: MPI is
started when a world is discovered or a group is opened.
"""

from lockstep.devices import device
from lockstep.launch import run
from lockstep.mpi_backend.register import register as _register
from lockstep.session import session
from lockstep.spawn import spawn
from lockstep.world import World, discover

__all__ = ["World", "device", "discover", "run", "session", "spawn"]

_register()
