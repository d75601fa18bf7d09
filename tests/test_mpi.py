"""Runs tests/mpi inside of mpirun: each MPI and number of ranks is one test here."""

from __future__ import annotations

from pathlib import Path

import pytest

from launching import ROOT, Program, need

TESTS = ROOT / "tests" / "mpi"
LIMIT = 300.0
RUNS = [*(("openmpi", ranks) for ranks in (1, 2, 3, 4)), ("mpich", 3), ("impi", 3)]
# What sums, on more ranks than the rest needs.
MANY = 8
SUMS = ("test_reducers.py", "test_on_node.py", "test_allreduce.py")
PICKED = "lengths or bits or many_sums or test_all_reduce or reduce_scatter or subgroup"
OPTIONS = ("-q", "--color=no", "--durations=5", "-p", "no:cacheprovider", "-W", "ignore")


@pytest.mark.parametrize(("name", "ranks"), RUNS, ids=str)
def test_on_every_rank(name: str, ranks: int, tmp_path: Path) -> None:
    """All tests of tests/mpi pass on all ranks; the report inside is shown if not."""
    run(name, ranks, tmp_path, str(TESTS))


@pytest.mark.parametrize("name", ["openmpi", "mpich", "impi"])
def test_sums_on_many_ranks(name: str, tmp_path: Path) -> None:
    """Those whose cuts and turns depend on the number of ranks, on eight."""
    run(name, MANY, tmp_path, *(str(TESTS / file) for file in SUMS), "-k", PICKED)


def run(name: str, ranks: int, tmp_path: Path, *arguments: str) -> None:
    """Run pytest on all ranks, and check what comes out."""
    mpi = need(name)
    # The outer pytest's own variables are not for the one inside.
    env = mpi.environment()
    for variable in ("PYTEST_CURRENT_TEST", "PYTEST_ADDOPTS"):
        env.pop(variable, None)
    command = mpi.command(ranks, "-m", "pytest", *OPTIONS, f"--rootdir={ROOT}", *arguments)
    outcome = Program(command, env, tmp_path).finish(LIMIT)
    assert not outcome.timed_out, str(outcome)
    assert outcome.code == 0, str(outcome)
    assert " passed" in outcome.text, str(outcome)
    print(outcome)
