"""Every batch file runs to its end under a real Slurm, launched by each of the three ways."""

from __future__ import annotations

import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from launching import ROOT
from lockstep.errors import counted
from slurm_cluster import LAB, Slurm

# MPI, way that is asked for ("" is for none), way that is taken.
WAYS = [("openmpi", "", "pmix"), ("mpich", "", "pmi2"), ("openmpi", "mpirun", "mpirun")]
TRAINING = ("--epochs=1", "--batch-size=500", "--channels-last=off")
TINY = ("--data=synthetic", "--width=4", "--batch-size=8", "--max-steps=4")
JOBS: dict[str, tuple[str, ...]] = {
    "ptdist": ("--largest=4",),
    "smoke": (),
    "mnist_ddp": TRAINING,
    "sync_sgd": TRAINING,
    "resnet_ddp": TINY,
}
FORM = ("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1")
LIMIT = 180.0


@pytest.mark.parametrize("launch", WAYS, ids=["pmix", "pmi2", "mpirun"])
@pytest.mark.parametrize("name", JOBS)
def test_runs_to_its_end(
    slurm: Slurm, name: str, launch: tuple[str, str, str], tmp_path: Path
) -> None:
    """DONE is in the run directory, which the job's number names; so is the log."""
    mpi, asked, way = launch
    job = slurm.submit(
        name, *JOBS[name], mpi=mpi, directory=tmp_path, options=FORM, LOCKSTEP_LAUNCH=asked
    )
    job.must_be_done(LIMIT)
    assert f"by {way}, 2 ranks on " in job.text(), str(job)
    assert f"{job.run} is DONE, code 0" in job.text(), str(job)


def test_scaling(slurm: Slurm, tmp_path: Path) -> None:
    """Each task of the array takes its own number of nodes."""
    form = ("--nodes=3", "--ntasks-per-node=1", "--cpus-per-task=1", "--array=1,3")
    log = f"--output={tmp_path}/%x-%A_%a.log"
    whole = slurm.submit("scaling", *TINY, directory=tmp_path, options=(*form, log))
    for nodes in (1, 3):
        name = f"{whole.number}_{nodes}"
        job = replace(
            whole,
            number=name,
            log=tmp_path / f"scaling-{name}.log",
            run=whole.run.parent / f"scaling-{name}",
        )
        job.must_be_done(LIMIT)
        assert f"{counted(nodes, 'rank')} on {counted(nodes, 'node')}" in job.text(), str(job)


def test_threads_and_cores(slurm: Slurm, tmp_path: Path) -> None:
    """A rank has as many threads as Slurm gave it cores."""
    form = ("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=2")
    job = slurm.submit("ptdist", "--largest=4", directory=tmp_path, options=form)
    job.must_be_done(LIMIT)
    assert "2 ranks on 2 nodes, 2 threads a rank" in job.text(), str(job)


def test_a_run_directory_of_another_job(slurm: Slurm, tmp_path: Path) -> None:
    """A job that starts for the first time does not write into one that is there."""
    shown = slurm.call("scontrol", "show", "config")
    number = next(x.split("=")[1].strip() for x in shown.splitlines() if "NEXT_JOB_ID" in x)
    theirs = tmp_path / "runs" / f"ptdist-{number}"
    theirs.mkdir(parents=True)
    (theirs / "DONE").touch()
    job = slurm.submit("ptdist", directory=tmp_path, options=FORM)
    assert job.run == theirs
    assert job.finish(LIMIT) == "FAILED", str(job)
    assert f"{theirs} is there already" in job.text(), str(job)
    assert [path.name for path in theirs.iterdir()] == ["DONE"]


def test_an_environment_that_is_not_there(slurm: Slurm, tmp_path: Path) -> None:
    """Named, with what to do."""
    missing = {"LOCKSTEP_VENV": str(tmp_path / "nowhere")}
    job = slurm.submit("ptdist", directory=tmp_path, options=FORM, **missing)
    assert job.finish(LIMIT) == "FAILED", str(job)
    assert f"no {tmp_path}/nowhere in {ROOT}" in job.text(), str(job)
    assert "make setup MPI=openmpi" in job.text(), str(job)


@pytest.mark.parametrize(("way", "code"), [("", 0), ("none", 1)], ids=["good", "broken"])
def test_slurm_smoke(slurm: Slurm, way: str, code: int, tmp_path: Path) -> None:
    """What `make slurm-smoke` calls says in words and by its code how the cluster is."""
    variables = slurm.variables("openmpi", tmp_path, LOCKSTEP_LAUNCH=way)
    command = [
        str(LAB),
        "exec",
        str(ROOT / "slurm" / "smoke-check.sh"),
        *FORM,
        f"--output={tmp_path}/%x-%j.log",
    ]
    done = subprocess.run(
        command, env=variables, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    for name in ("smoke", "ptdist"):
        assert f"{name}: {'good' if code == 0 else 'NOT good, FAILED'}" in done.stdout, done.stdout
    if code:
        assert "needed: srun --mpi=pmix for Open MPI" in done.stdout, done.stdout


def test_nodes_have_room_for_the_commands_of_readme(slurm: Slurm) -> None:
    """Those that are given for slurm-lab could start; the same file as it is asks for too much."""
    text = (ROOT / "README.md").read_text()
    commands = re.findall(r"^\$ tests/cluster/slurm-lab exec sbatch (.*)$", text, re.MULTILINE)
    assert commands
    for command in commands:
        slurm.call("sbatch", "--test-only", *shlex.split(command))
    with pytest.raises(AssertionError, match="node configuration is not available"):
        slurm.call("sbatch", "--test-only", "slurm/resnet_ddp.sbatch")
