"""Unit tests run in one process; MPI's library may be loaded there, but is never started."""

from __future__ import annotations

import mpi4py

mpi4py.rc.initialize = False
