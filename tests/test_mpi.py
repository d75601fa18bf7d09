"""Runs tests/mpi inside of mpirun: each MPI and number of ranks is one test here."""

from __future__ import annotations

from pathlib import Path

import pytest

from launching import ROOT, Program, need

LIMIT = 300.0
RUNS = [*(("openmpi", ranks) for ranks in (1, 2, 3, 4)), ("mpich", 3), ("impi", 3)]
OPTIONS = ("-q", "--color=no", "--durations=5", "-p", "no:cacheprovider", "-W", "ignore")


@pytest.mark.parametrize(("name", "ranks"), RUNS, ids=str)
def test_on_every_rank(name: str, ranks: int, tmp_path: Path) -> None:
    """All tests of tests/mpi pass on all ranks; the report inside is shown if not."""
    mpi = need(name)
    # The outer pytest's own variables are not for the one inside.
    env = mpi.environment()
    for variable in ("PYTEST_CURRENT_TEST", "PYTEST_ADDOPTS"):
        env.pop(variable, None)
    tests = str(ROOT / "tests" / "mpi")
    command = mpi.command(ranks, "-m", "pytest", *OPTIONS, f"--rootdir={ROOT}", tests)
    outcome = Program(command, env, tmp_path).finish(LIMIT)
    assert not outcome.timed_out, str(outcome)
    assert outcome.code == 0, str(outcome)
    assert " passed" in outcome.text, str(outcome)
    print(outcome)
