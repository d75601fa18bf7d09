"""Each way to launch each MPI under a real Slurm: a whole world, or an error that names the way."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slurm_cluster import Job, Slurm

NAMES = {"openmpi": "Open MPI", "mpich": "MPICH", "impi": "Intel MPI"}
NEEDED = {"openmpi": "pmix", "mpich": "pmi2", "impi": "pmi2"}
# For each MPI: launches that build a whole world ("" chooses by itself), launches that do not.
GOOD = {"openmpi": ("", "mpirun"), "mpich": ("", "mpirun"), "impi": ("", "mpirun")}
BROKEN = {"openmpi": ("none", "pmi2"), "mpich": ("none", "pmix"), "impi": ("none", "pmix")}
FORMS = ("--nodes=2", "--ntasks-per-node=1")
LIMIT = 120.0

GOOD_ONES = [(mpi, way) for mpi, ways in GOOD.items() for way in ways]
BROKEN_ONES = [(mpi, way) for mpi, ways in BROKEN.items() for way in ways]


@pytest.mark.parametrize(("mpi", "way"), GOOD_ONES)
def test_a_whole_world(slurm: Slurm, mpi: str, way: str, tmp_path: Path) -> None:
    """Both ranks are in it, on two nodes; the log says how they were launched."""
    job = start(slurm, mpi, way, tmp_path)
    job.must_be_done(LIMIT)
    assert f"by {way or NEEDED[mpi]}, 2 ranks on " in job.text(), str(job)
    assert "2 ranks on 2 nodes" in job.text(), str(job)
    hosts = set(re.findall(r"rank \d of 2 on (n\d): ring", job.text()))
    assert len(hosts) == 2, str(job)


@pytest.mark.parametrize(("mpi", "way"), BROKEN_ONES)
def test_a_broken_world(slurm: Slurm, mpi: str, way: str, tmp_path: Path) -> None:
    """The job fails, and its log names what was found, what is needed and what to do."""
    job = start(slurm, mpi, way, tmp_path)
    assert job.finish(LIMIT) == "FAILED", str(job)
    text = job.text()
    assert "LaunchError: broken launch: srun announced 2 ranks" in text, str(job)
    assert f"with --mpi={way} {NAMES[mpi]} leaves each rank alone" in text, str(job)
    assert f"needed: srun --mpi={NEEDED[mpi]} for {NAMES[mpi]}" in text, str(job)
    assert f": LOCKSTEP_RUN={job.run} sbatch " in text, str(job)
    assert not (job.run / "DONE").exists()
    assert job.shown()["Restarts"] == "0", str(job)


def start(slurm: Slurm, mpi: str, way: str, directory: Path) -> Job:
    """Submit the first lesson by a way to launch."""
    return slurm.submit(
        "ptdist",
        "--largest=4",
        mpi=mpi,
        directory=directory,
        options=FORMS,
        LOCKSTEP_LAUNCH=way,
    )
