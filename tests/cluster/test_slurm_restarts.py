"""A training under a real Slurm comes back: after its time limit, after a lost node, by hand."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from slurm_cluster import ENDED, Job, Slurm, lab

FORM = ("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1")
TINY = ("--data=synthetic", "--width=4", "--batch-size=8", "--deterministic", "--log-interval=10")
LIMIT = 240.0
# The node that runs the batch script, or the other one; how it is launched; what the log says then.
LOST = [
    (1, "", r"code \d+; a node of .* does not answer \(time 1\); requeued"),
    (1, "mpirun", r"code 0 without .*/DONE, as after a lost node \(time 1\); requeued"),
    (0, "", ""),  # the script itself is gone: Slurm requeues
]


def start(slurm: Slurm, directory: Path, steps: int, *more: str, **how: str) -> Job:
    """Submit a training of so many steps that saves now and then and exports its weights."""
    options = (*FORM, *(f"--{name}={how.pop(name)}" for name in ("time", "signal") if name in how))
    export = f"--export={directory}/weights.safetensors"
    flags = (*TINY, "--epochs=1000", f"--max-steps={steps}", export, *more)
    return slurm.submit("resnet_ddp", *flags, directory=directory, options=options, **how)


def steps_done(job: Job) -> int:
    """Return the number of the last step that the log shows, of all starts."""
    return max((int(x) for x in re.findall(r"\bstep (\d+)", job.text())), default=0)


def wait_for_step(job: Job, step: int, limit: float = LIMIT) -> None:
    """Wait until a training has come so far."""
    end = time.monotonic() + limit
    while steps_done(job) < step:
        goes_on = job.shown()["JobState"] not in ENDED and time.monotonic() < end
        assert goes_on, f"step {step} is not reached, {job}"
        time.sleep(0.2)


def wait_for_requeue(job: Job, limit: float = 120.0) -> None:
    """Wait until Slurm has seen that a node is lost; of one that is back it sees it late."""
    end = time.monotonic() + limit
    while job.shown()["Restarts"] == "0":
        assert time.monotonic() < end, f"not requeued, {job}"
        time.sleep(0.2)


def nothing_runs(limit: float = 60.0) -> bool:
    """Wait until no process but Slurm's own is left on any node."""
    end = time.monotonic() + limit
    while (left := lab("processes")) and time.monotonic() < end:
        time.sleep(0.5)
    assert not left, left
    return True


def test_a_limit_of_a_minute(slurm: Slurm, tmp_path: Path) -> None:
    """Signalled, requeued, resumed, finished: the weights are those of a run without a limit."""
    for name in ("pace", "whole", "cut"):
        (tmp_path / name).mkdir()
    pace = start(slurm, tmp_path / "pace", 100)
    pace.must_be_done(LIMIT)
    seconds = float(re.findall(r"training ([\d.]+) s", pace.text())[-1])
    # The limit's signal comes 10 to 40 s after the start.
    steps = int(100 * 50 / seconds)
    whole = start(slurm, tmp_path / "whole", steps)
    whole.must_be_done(LIMIT)
    assert whole.shown()["Restarts"] == "0"
    cut = start(slurm, tmp_path / "cut", steps, time="1", signal="B:USR2@20")
    cut.must_be_done(2 * LIMIT)
    assert int(cut.shown()["Restarts"]) >= 1, str(cut)
    assert "stopped before the time limit, code 85; requeued" in cut.text(), str(cut)
    assert "asked to leave by" in cut.text()
    expected, found = (load_file(job.log.parent / "weights.safetensors") for job in (whole, cut))
    assert expected.keys() == found.keys()
    assert all(expected[name].equal(found[name]) for name in expected)
    last = [(job.run / "results.csv").read_text().splitlines()[-1] for job in (whole, cut)]
    assert last[0].split(",")[:3] == last[1].split(",")[:3]


@pytest.mark.parametrize(("place", "way", "said"), LOST, ids=["srun", "mpirun", "batch-node"])
def test_a_lost_node(slurm: Slurm, place: int, way: str, said: str, tmp_path: Path) -> None:
    """The job is requeued, goes on from its checkpoint, and comes to its end."""
    job = start(slurm, tmp_path, 300, "--save-steps=20", LOCKSTEP_LAUNCH=way)
    wait_for_step(job, 30)
    nodes = slurm.call("scontrol", "show", "hostnames", job.shown()["NodeList"]).split()
    try:
        lab("kill-node", nodes[place])
        if said:
            job.wait_until("; requeued, goes on in", LIMIT)
            assert re.search(said, job.text()), str(job)
        else:
            wait_for_requeue(job)
    finally:
        lab("up")
    job.must_be_done(LIMIT)
    assert int(job.shown()["Restarts"]) == 1, str(job)
    assert ", start 1: " in job.text(), str(job)
    assert re.search(r"resume: from .*step-\d+", job.text()), str(job)


def test_a_lost_node_that_is_back_at_once(slurm: Slurm, tmp_path: Path) -> None:
    """It answers again by the time the script asks; that it was gone is what Slurm tells of it."""
    job = start(slurm, tmp_path, 300, "--save-steps=20")
    wait_for_step(job, 30)
    nodes = slurm.call("scontrol", "show", "hostnames", job.shown()["NodeList"]).split()
    try:
        lab("kill-node", nodes[1])
    finally:
        lab("up")
    job.must_be_done(LIMIT)
    assert re.search(rf"code \d+; lost, and back since: {nodes[1]} \(", job.text()), str(job)
    assert int(job.shown()["Restarts"]) == 1, str(job)
    assert re.search(r"resume: from .*step-\d+", job.text()), str(job)


def test_a_node_lost_once_too_often(slurm: Slurm, tmp_path: Path) -> None:
    """After so many requeues the job fails; that mpirun returns 0 makes no success of it."""
    job = start(slurm, tmp_path, 100_000, LOCKSTEP_LAUNCH="mpirun", LOCKSTEP_RETRIES="0")
    wait_for_step(job, 10)
    nodes = slurm.call("scontrol", "show", "hostnames", job.shown()["NodeList"]).split()
    try:
        lab("kill-node", nodes[1])
        assert job.finish(LIMIT) == "FAILED", str(job)
    finally:
        lab("up")
    assert "failed: code 0 without " in job.text(), str(job)
    assert f": LOCKSTEP_RUN={job.run} sbatch " in job.text(), str(job)


@pytest.mark.parametrize("way", ["", "mpirun"], ids=["srun", "mpirun"])
def test_scancel(slurm: Slurm, way: str, tmp_path: Path) -> None:
    """No process is left, and the checkpoint is good: a new job goes on from it to the end."""
    job = start(slurm, tmp_path, 100_000, "--save-steps=20", LOCKSTEP_LAUNCH=way)
    wait_for_step(job, 40)
    slurm.call("scancel", job.number)
    assert job.finish(LIMIT) == "CANCELLED", str(job)
    assert nothing_runs()
    assert job.shown()["Restarts"] == "0", str(job)
    reached = steps_done(job)
    again = start(slurm, tmp_path, reached + 20, LOCKSTEP_RUN=str(job.run))
    assert again.finish(LIMIT) == "COMPLETED", str(again)
    assert (job.run / "DONE").exists()
    resumed = re.search(r"resume: from .*step-(\d+)", again.text())
    assert resumed, str(again)
    assert int(resumed[1]) >= 40, str(again)
