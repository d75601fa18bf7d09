"""Fixtures of the tests on clusters."""

from __future__ import annotations

from hosts_fixtures import hosts, lab

__all__ = ["hosts", "lab"]
