"""Scripts that never heard of Lockstep, and the environment variable that keeps it away."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from launching import Launcher, Outcome, Program, need

AUTOLOAD = str(Path(__file__).parent / "programs" / "autoload.py")
DETAIL = str(Path(__file__).parent / "programs" / "detail.py")
LIMIT = 90.0

FIND = (
    "from importlib.metadata import entry_points as e; "
    "print([p.name for p in e(group='torch.backends')])"
)
PRELOADED = f"import lockstep, runpy; runpy.run_path({AUTOLOAD!r}, run_name='__main__')"


@pytest.fixture
def mpi() -> Launcher:
    """Return Open MPI with the package installed, not only on the path."""
    found = need("openmpi")
    done = subprocess.run(
        [found.python, "-c", FIND],
        env=found.environment(),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    if "lockstep_mpi" not in done.stdout:
        pytest.skip("lockstep is on the path here but not installed: torch cannot load it")
    return found


def plain(mpi: Launcher, directory: Path, *program: str, **extra: str) -> Outcome:
    """Run a program without a launcher."""
    return Program([mpi.python, *program], mpi.environment(**extra), directory).finish(LIMIT)


def test_a_script_that_only_imports_torch(mpi: Launcher, tmp_path: Path) -> None:
    """It opens "mpi", and MPI is not loaded before."""
    outcome = mpi.run(3, AUTOLOAD, directory=tmp_path, limit=LIMIT)
    assert outcome.code == 0, str(outcome)
    assert outcome.text.count("sum 3.0 of 3") == 3


def test_switched_off(mpi: Launcher, tmp_path: Path) -> None:
    """LOCKSTEP_AUTOLOAD=0 leaves torch as it was."""
    outcome = plain(mpi, tmp_path, AUTOLOAD, LOCKSTEP_AUTOLOAD="0")
    assert outcome.code != 0, str(outcome)
    assert "MPI" in outcome.text
    assert "built" in outcome.text
    assert "sum" not in outcome.text


def test_switched_off_and_imported(mpi: Launcher, tmp_path: Path) -> None:
    """`import lockstep` works with and without autoload."""
    off = plain(mpi, tmp_path, "-c", PRELOADED, LOCKSTEP_AUTOLOAD="0")
    assert off.code == 0, str(off)
    assert "sum 1.0 of 1" in off.text
    assert plain(mpi, tmp_path, "-c", PRELOADED).code == 0


@pytest.mark.parametrize("name", ["mpi", "cpu:mpi"])
def test_torch_s_debug_level_detail(name: str, tmp_path: Path) -> None:
    """torch wraps the groups, compares the calls itself, and all verbs work."""
    store = str(tmp_path / "store")
    outcome = need("openmpi").run(
        3, DETAIL, name, store, directory=tmp_path, limit=LIMIT, TORCH_DISTRIBUTED_DEBUG="DETAIL"
    )
    assert outcome.code == 0, str(outcome)
    assert outcome.text.count("good") == 3
    assert outcome.text.count("found:") == 3
