"""The first job: tensors from rank to rank, over MPI and over gloo."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launching import ROOT, Program, need

JOB = str(ROOT / "jobs" / "ptdist.py")
LIMIT = 120.0


@pytest.mark.parametrize(
    ("flag", "code", "said"), [("--help", 0, "--backend"), ("--no-such-flag", 2, "unrecognized")]
)
def test_help_and_wrong_flags_never_start_mpi(
    flag: str, code: int, said: str, tmp_path: Path
) -> None:
    """They work where no MPI can be loaded at all."""
    mpi = need("openmpi")
    env = mpi.environment(MPI4PY_LIBMPI="/nonexistent/libmpi.so")
    outcome = Program([mpi.python, JOB, flag], env, tmp_path).finish(LIMIT)
    assert outcome.code == code, str(outcome)
    assert said in outcome.text
    assert "LaunchError" not in outcome.text


@pytest.mark.parametrize("launched", [False, True], ids=["plain", "mpirun"])
def test_one_rank_says_what_it_needs(launched: bool, tmp_path: Path) -> None:
    """Code 2, and no traceback."""
    mpi = need("openmpi")
    command = mpi.command(1, JOB) if launched else [mpi.python, JOB]
    outcome = Program(command, mpi.environment(), tmp_path).finish(LIMIT)
    assert outcome.code == 2, str(outcome)
    assert "needed: 2 or more" in outcome.text
    assert "Traceback" not in outcome.text


@pytest.mark.parametrize("backend", ["mpi", "gloo"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_on_several_ranks(backend: str, ranks: int, tmp_path: Path) -> None:
    """Every rank but the root gets the tensor twice; the token comes round."""
    outcome = need("openmpi").run(
        ranks, JOB, "--backend", backend, "--largest", "65536", directory=tmp_path, limit=LIMIT
    )
    assert outcome.code == 0, str(outcome)
    for rank in range(1, ranks):
        for way in ("send/recv", "isend/irecv"):
            pattern = rf"rank {rank} of {ranks} on \S+: {way}: got \[1\.0, -1\.0\] from rank 0"
            assert re.search(pattern, outcome.text), str(outcome)
    assert re.search(rf"rank 0 of {ranks} on .*the token .* {ranks}\b", outcome.text), str(outcome)
    assert len(re.findall(r"^ +\d+ +\d+\.\d +\d+\.\d$", outcome.text, re.MULTILINE)) >= 4, str(
        outcome
    )


@pytest.mark.parametrize("name", ["mpich", "impi"])
def test_on_other_mpis(name: str, tmp_path: Path) -> None:
    """The same job, the same output."""
    outcome = need(name).run(3, JOB, "--largest", "4096", directory=tmp_path, limit=LIMIT)
    assert outcome.code == 0, str(outcome)
    assert outcome.text.count("got [1.0, -1.0] from rank 0") == 4
