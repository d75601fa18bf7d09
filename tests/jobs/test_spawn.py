"""lockstep.spawn, from a plain Python that no launcher has started."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from launching import Outcome, Program, need

PROGRAM = str(Path(__file__).parent / "programs" / "spawning.py")
LIMIT = 120.0

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("cloudpickle") is None,
    reason="cloudpickle is not installed: functions of a script cannot be sent",
)


def run(name: str, way: str, directory: Path) -> Outcome:
    """Run the program with a bare environment: nothing that an mpirun needs is set."""
    mpi = need(name)
    environment = {
        key: value
        for key, value in mpi.environment().items()
        if not key.startswith(("OMPI_", "PRTE_", "I_MPI_", "FI_", "VIRTUAL_ENV", "LOCKSTEP_"))
    }
    outcome = Program([mpi.python, PROGRAM, way], environment, directory).finish(LIMIT)
    assert not outcome.timed_out, outcome
    return outcome


@pytest.mark.parametrize("name", ["openmpi", "mpich", "impi"])
def test_results_in_rank_order(name: str, tmp_path: Path) -> None:
    """More ranks than cores, perhaps as root; what they print is shown."""
    outcome = run(name, "total", tmp_path)
    assert "result [(0, 6.0), (1, 6.0), (2, 6.0)]" in outcome.text, outcome
    assert outcome.text.count("hello from") == 3


@pytest.mark.parametrize("name", ["openmpi", "mpich", "impi"])
def test_the_first_failure_is_raised(name: str, tmp_path: Path) -> None:
    """The exception itself, with the traceback of its rank."""
    outcome = run(name, "fail", tmp_path)
    assert outcome.code == 1, outcome
    assert "KeyError: 'the cause'" in outcome.text, outcome
    assert "on rank 1 of 3:" in outcome.text, outcome


@pytest.mark.parametrize(
    ("way", "text"),
    [
        ("sleep", "SpawnTimeout: rank 0, 1 of 2 had no result after 10 s"),
        ("kill", "SpawnError: mpirun ended with code"),
        ("nested", "spawn was called inside of an MPI job"),
        ("mpirun", "SpawnError: mpirun ended with code 127"),
    ],
)
def test_what_goes_wrong(way: str, text: str, tmp_path: Path) -> None:
    """It is an error with a name, within the limit, and no process is left."""
    outcome = run("openmpi", way, tmp_path)
    assert outcome.code == 1, outcome
    assert text in outcome.text, outcome
    assert outcome.seconds < 60.0
