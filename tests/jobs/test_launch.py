"""Good and broken launches, under the real launchers of all MPIs that are here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launching import Launcher, Outcome, Program, need

WHOAMI = str(Path(__file__).parent / "programs" / "whoami.py")
MPIS = ["openmpi", "mpich", "impi"]
NAMES = {"openmpi": "Open MPI", "mpich": "MPICH", "impi": "Intel MPI"}
LIMIT = 60.0


def start_mixed(starter: Launcher, library: Launcher, directory: Path) -> Outcome:
    """Start a program by the launcher of one MPI, in the Python of another."""
    env = library.environment()
    if starter.name == "impi":
        env = {**starter.environment(), "PATH": starter.environment()["PATH"]}
    command = [starter.mpirun, "-n", "3", library.python, WHOAMI]
    return Program(command, env, directory).finish(LIMIT)


@pytest.mark.parametrize("name", MPIS)
@pytest.mark.parametrize("ranks", [1, 3])
def test_its_own_launcher(name: str, ranks: int, tmp_path: Path) -> None:
    """Every rank knows its number."""
    outcome = need(name).run(ranks, WHOAMI, directory=tmp_path, limit=LIMIT)
    assert outcome.code == 0, str(outcome)
    said = sorted(re.findall(r"rank \d+ of size \d+", outcome.text))
    assert said == [f"rank {rank} of size {ranks}" for rank in range(ranks)]


@pytest.mark.parametrize(
    ("starter", "library"),
    [("openmpi", "mpich"), ("openmpi", "impi"), ("mpich", "openmpi"), ("impi", "openmpi")],
)
def test_launcher_of_another_mpi(starter: str, library: str, tmp_path: Path) -> None:
    """Refused on every rank, with what was found and what to do; never worlds of one."""
    outcome = start_mixed(need(starter), need(library), tmp_path)
    assert not outcome.timed_out, str(outcome)
    assert outcome.code != 0, str(outcome)
    assert "of size" not in outcome.text, str(outcome)
    assert "LaunchError: broken launch" in outcome.text, str(outcome)
    assert "announced 3 ranks" in outcome.text
    assert NAMES[library] in outcome.text
    assert "needed: mpirun and library of the same MPI" in outcome.text
    assert "to do:  start with the mpirun that belongs to" in outcome.text
    assert "Traceback" not in outcome.text


@pytest.mark.parametrize(("starter", "library"), [("mpich", "impi"), ("impi", "mpich")])
def test_launchers_of_one_family(starter: str, library: str, tmp_path: Path) -> None:
    """MPICH and Intel MPI share a launcher's protocol: a whole world, or a failure."""
    outcome = start_mixed(need(starter), need(library), tmp_path)
    assert not outcome.timed_out, str(outcome)
    if outcome.code == 0:
        said = sorted(re.findall(r"rank \d+ of size \d+", outcome.text))
        assert said == [f"rank {rank} of size 3" for rank in range(3)], str(outcome)
    else:
        assert "of size 1" not in outcome.text, str(outcome)


@pytest.mark.parametrize("name", MPIS)
def test_plain_python(name: str, tmp_path: Path) -> None:
    """Without a launcher it is a good world of size 1; in a batch script as well."""
    mpi = need(name)
    for extra in ({}, {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}):
        env = mpi.environment(**extra)
        outcome = Program([mpi.python, WHOAMI], env, tmp_path).finish(LIMIT)
        assert outcome.code == 0, str(outcome)
        assert "rank 0 of size 1" in outcome.text


def test_srun_that_announces_what_mpi_cannot_know(tmp_path: Path) -> None:
    """The variables of an srun without PMI: refused before MPI starts."""
    mpi = need("openmpi")
    env = mpi.environment(SLURM_STEP_NUM_TASKS="4", SLURM_NTASKS="4", SLURM_PROCID="2")
    outcome = Program([mpi.python, WHOAMI], env, tmp_path).finish(LIMIT)
    assert outcome.code != 0, str(outcome)
    assert "srun announced 4 ranks" in outcome.text
    assert "srun --mpi=pmix" in outcome.text


@pytest.mark.parametrize("ranks", [0, 2], ids=["plain", "mpirun"])
def test_a_library_that_cannot_be_loaded(ranks: int, tmp_path: Path) -> None:
    """Named, with what to do, and without a stack of our own."""
    mpi = need("openmpi")
    command = mpi.command(ranks, WHOAMI) if ranks else [mpi.python, WHOAMI]
    env = mpi.environment(MPI4PY_LIBMPI="/nonexistent/libmpi.so")
    outcome = Program(command, env, tmp_path).finish(LIMIT)
    assert not outcome.timed_out
    assert outcome.code != 0, str(outcome)
    assert "LaunchError: mpi4py cannot load an MPI library" in outcome.text, str(outcome)
    assert "/nonexistent/libmpi.so" in outcome.text
    assert "to do:" in outcome.text
    assert "of size" not in outcome.text
