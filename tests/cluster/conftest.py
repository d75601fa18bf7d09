"""Fixtures of the tests on clusters."""

from __future__ import annotations

from hosts_fixtures import hosts, lab, other_openmpi
from slurm_cluster import slurm

__all__ = ["hosts", "lab", "other_openmpi", "slurm"]
