"""What all tests share: tests/mpi is started by test_mpi.py, never collected beside the others."""

from __future__ import annotations

from pathlib import Path

import pytest

_HERE = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    """Show where the time goes: most of these tests start processes."""
    if config.option.durations is None:
        config.option.durations = 15


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave tests/mpi and tests/conformance out unless they were asked for by name."""
    if collection_path not in (_HERE / "mpi", _HERE / "conformance"):
        return None
    asked = [Path(argument.split("::")[0]).resolve() for argument in config.args]
    return None if any(path.is_relative_to(collection_path) for path in asked) else True
