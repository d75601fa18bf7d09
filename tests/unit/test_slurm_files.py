"""The rules of the batch files; that they work is shown in tests/cluster, on a real Slurm."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from launching import ROOT

SLURM = ROOT / "slurm"
BATCH = sorted(SLURM.glob("*.sbatch"))
SHELL = [*BATCH, *sorted(SLURM.glob("*.sh")), SLURM / "site.sh.example"]
# What each must ask Slurm for: a note before the limit, another turn, one log for all turns.
ASKED = (
    "--job-name=",
    "--nodes=",
    "--time=",
    "--signal=B:USR2@",
    "--requeue",
    "--open-mode=append",
)


def short(path: Path) -> str:
    """Return a file's name for the report."""
    return path.name


def test_there_is_one_for_each_job() -> None:
    """Of those that run on a cluster."""
    names = {path.stem for path in BATCH}
    assert names >= {"ptdist", "smoke", "mnist_ddp", "sync_sgd", "resnet_ddp", "scaling"}


@pytest.mark.parametrize("path", BATCH, ids=short)
def test_a_batch_file(path: Path) -> None:
    """Short; asks for what a restart needs; each number once; the user's arguments come last."""
    text = path.read_text()
    lines = text.splitlines()
    assert len(lines) <= 40
    options = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]
    for wanted in ASKED:
        assert sum(option.startswith(wanted) for option in options) == 1, wanted
    assert f"--job-name={path.stem}" in options
    output = next(option for option in options if option.startswith("--output="))
    assert re.search(r"%j|%A_%a", output), output
    assert "set -euo pipefail" in lines
    assert lines[-1].startswith("lockstep_job jobs/")
    assert lines[-1].endswith(' "$@"')
    assert (ROOT / lines[-1].split()[1]).exists()


@pytest.mark.parametrize("path", SHELL, ids=short)
def test_bash_reads_it(path: Path) -> None:
    """Without a complaint."""
    done = subprocess.run(
        ["bash", "-n", str(path)], capture_output=True, text=True, timeout=20, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
