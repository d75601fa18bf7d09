"""Fixtures of the tests on clusters."""

from __future__ import annotations

from hosts_fixtures import hosts, lab
from slurm_cluster import slurm

__all__ = ["hosts", "lab", "slurm"]
