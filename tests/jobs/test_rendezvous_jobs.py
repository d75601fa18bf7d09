"""Meeting on a shared path, as whole jobs: two at once, after a killed one, with a failure."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from launching import Launcher, Program, need

PROGRAM = str(Path(__file__).parent / "programs" / "meeting.py")
# Seconds to start Python and torch on all ranks, on a machine that others use as well.
START = 90.0
# Seconds from the event to the end of the launcher.
END = 5.0


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """Return a directory to meet in."""
    path = tmp_path / "shared"
    path.mkdir()
    return path


@pytest.fixture
def mpi() -> Launcher:
    """Return Open MPI."""
    return need("openmpi")


def start(mpi: Launcher, url: object, how: str, directory: Path, name: str, **env: str) -> Program:
    """Start 2 ranks."""
    command = mpi.command(2, PROGRAM, str(url), how)
    return Program(command, mpi.environment(**env), directory, name)


def test_what_a_killed_job_left_is_not_met(mpi: Launcher, shared: Path, tmp_path: Path) -> None:
    """kill -9 leaves its place behind; the next start takes another one, and removes only that."""
    killed = start(mpi, f"file://{shared}", "hang", tmp_path, "killed")
    killed.wait_for("open", 2, START)
    killed.process.kill()
    killed.end()
    left = list(shared.iterdir())
    assert len(left) == 1
    assert {path.name for path in left[0].iterdir()} >= {"store"}
    outcome = start(mpi, f"file://{shared}", "well", tmp_path, "next").finish(START)
    assert outcome.code == 0, outcome
    assert list(shared.iterdir()) == left


def test_two_jobs_in_one_directory(mpi: Launcher, shared: Path, tmp_path: Path) -> None:
    """They open at the same time and do not see each other."""
    first = start(mpi, f"file://{shared}", "hang", tmp_path, "first", SLURM_JOB_ID="7")
    first.wait_for("open", 2, START)
    second = start(mpi, f"file://{shared}", "well", tmp_path, "second", SLURM_JOB_ID="7")
    outcome = second.finish(START)
    first.end()
    assert outcome.code == 0, outcome
    assert [path.name[:11] for path in shared.iterdir()] == ["lockstep-7-"]


def test_an_exception_on_one_rank(mpi: Launcher, shared: Path, tmp_path: Path) -> None:
    """The job ends in seconds; the cause is shown, and nothing is left in the directory."""
    program = start(mpi, f"file://{shared}", "raise", tmp_path, "failing")
    outcome = program.finish(START)
    ended = time.time()
    assert outcome.code not in (0, None), outcome
    assert "KeyError: 'the cause'" in outcome.text, outcome
    event = float(re.findall(r"event (\d+\.\d+)", outcome.text)[0])
    assert ended - event < END, outcome
    assert list(shared.iterdir()) == []


def test_a_wrong_world_size(mpi: Launcher, tmp_path: Path) -> None:
    """Left from another launcher: both numbers are named on every rank."""
    outcome = start(mpi, "env", "well", tmp_path, "wrong", WORLD_SIZE="8", RANK="0").finish(START)
    assert outcome.code not in (0, None), outcome
    assert "WORLD_SIZE=8 in the environment, but MPI says 2" in outcome.text, outcome
    assert "open" not in re.sub("cannot open|opened|opens", "", outcome.text), outcome
