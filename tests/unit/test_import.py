"""Importing the package does nothing but register the backend."""

from __future__ import annotations

import subprocess
import sys

import pytest

CHECK = """
import sys, threading
before = threading.active_count()
import {module}
assert "mpi4py.MPI" not in sys.modules, "MPI was imported"
assert threading.active_count() == before == 1, threading.enumerate()
import torch.distributed as dist
print(dist.Backend._plugins["MPI"].creator_fn.__module__)
"""


@pytest.mark.parametrize(
    "module", ["lockstep", "lockstep.mpi_backend", "lockstep.mpi_backend.register"]
)
def test_importing_starts_nothing(module: str) -> None:
    """No MPI, no thread; the creator is ours."""
    done = subprocess.run(
        [sys.executable, "-c", CHECK.format(module=module)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "lockstep.mpi_backend.register"
