"""The smoke test as a whole: healthy, and with a rank that is stopped, killed, or odd."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launching import ROOT, Launcher, Program, need
from smoke_result import Result

JOB = str(ROOT / "jobs" / "smoke.py")
NAMES = ["launch", "software", "path", "cpus", "memory"]
NAMES += ["gpus", "network", "torch", "all-reduce", "data"]
# Seconds for a smoke test, on a machine that others use as well.
LIMIT = 300.0
# What a busy machine does slowly is not what these tests look for.
PATIENT = ("--within", "200", "--limit", "90")
MPIS = pytest.mark.parametrize("name", ["openmpi", "mpich", "impi"])


def written(directory: Path) -> dict[str, Any]:
    """Return the one smoke.json there is."""
    (path,) = (directory / "runs").glob("smoke-*/smoke.json")
    return json.loads(path.read_text())


def smoke(mpi: Launcher, ranks: int, directory: Path, *flags: str, **extra: str) -> Result:
    """Run it to its end on so many ranks."""
    flags = flags or PATIENT
    outcome = mpi.run(ranks, JOB, *flags, directory=directory, limit=LIMIT, **extra)
    assert not outcome.timed_out, str(outcome)
    return Result(outcome, written(directory))


def started(mpi: Launcher, command: list[str], directory: Path) -> tuple[Program, dict[int, int]]:
    """Start it, and return the process of each rank once they have met."""
    program = Program(command, mpi.environment(), directory)
    program.wait_for("launch", 1, LIMIT)
    return program, dict(_ranks(directory))


def _ranks(directory: Path) -> Iterator[tuple[int, int]]:
    """Find the ranks, and their processes, by the directory that is this test's alone."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "cwd").readlink() != directory:
                continue
            variables = (entry / "environ").read_bytes().split(b"\0")
            line = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        for variable in variables:
            name, _, value = variable.partition(b"=")
            if name in (b"OMPI_COMM_WORLD_RANK", b"PMI_RANK") and JOB.encode() in line:
                yield int(value), int(entry.name)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_healthy(ranks: int, tmp_path: Path) -> None:
    """No check fails; table, JSON and page tell the same."""
    result = smoke(need("openmpi"), ranks, tmp_path, COLUMNS="160")
    assert result.outcome.code == 0, str(result.outcome)
    record = result.record
    assert [it["name"] for it in record["checks"]] == NAMES
    assert record["state"] == "done"
    assert record["ranks"] == ranks
    for it in record["checks"]:
        assert it["verdict"] in ("ok", "warning", "not applicable"), it
        assert it["question"].endswith("?")
        assert bool(it["faults"]) == (it["verdict"] == "warning"), it
        assert all(fault["cure"] for fault in it["faults"])
        assert f" {it['name']} " in result.outcome.text
    assert result.check("torch")["details"]["difference_of_the_ways"] < 1e-12
    assert len(result.check("network")["details"]["links"]) == ranks * (ranks - 1) // 2
    assert len(os.listdir(tmp_path / "runs")) == 1
    _is_whole_page(next((tmp_path / "runs").glob("smoke-*/smoke.html")), ranks)


def _is_whole_page(path: Path, ranks: int) -> None:
    """All checks, with pictures, and nothing that would have to be loaded."""
    page = path.read_text()
    for name in NAMES:
        assert f'<h2 id="{name}">' in page
    assert page.count("<svg ") == (2 if ranks == 1 else 4)
    assert not re.search(r'(src|href)="(?!data:|#)', page)
    assert "<script" not in page


@MPIS
def test_healthy_with_each_mpi(name: str, tmp_path: Path) -> None:
    """Three ranks, by plain lines where there is no terminal."""
    result = smoke(need(name), 3, tmp_path)
    assert result.outcome.code == 0, str(result.outcome)
    assert result.check("launch")["verdict"] == "ok"


@MPIS
def test_a_stopped_rank(name: str, tmp_path: Path) -> None:
    """It is named with what has become of it, once; the checks that need no others still run."""
    mpi = need(name)
    command = mpi.command(3, JOB, "--limit", "5")
    program, pids = started(mpi, command, tmp_path)
    os.kill(pids[1], signal.SIGSTOP)
    stopped = time.monotonic()
    outcome = program.finish(LIMIT)
    assert time.monotonic() - stopped < 60, str(outcome)
    assert not outcome.timed_out, str(outcome)
    assert outcome.code != 0, str(outcome)
    record = written(tmp_path)
    found = [fault["found"] for it in record["checks"] for fault in it["faults"]]
    lost = [text for text in found if "does not answer" in text]
    assert len(lost) == 1, str(outcome)
    assert re.match(rf"rank 1 \(.*, pid {pids[1]}\) does not answer: it is stopped", lost[0])
    assert record["state"] == "done"
    assert {it["name"] for it in record["checks"]} == set(NAMES)
    assert next((tmp_path / "runs").glob("smoke-*/smoke.html")).stat().st_size > 2000
    assert [it.name for it in (tmp_path / "runs").iterdir() if it.name.startswith("lock")] == []


def test_a_stopped_root(tmp_path: Path) -> None:
    """The others say that it is the root, and end the job."""
    mpi = need("openmpi")
    program, pids = started(mpi, mpi.command(3, JOB, "--limit", "2"), tmp_path)
    os.kill(pids[0], signal.SIGSTOP)
    outcome = program.finish(LIMIT)
    assert not outcome.timed_out, str(outcome)
    assert outcome.code == 1, str(outcome)
    assert "rank 0, the root of the smoke test, has not been heard of" in outcome.text


@MPIS
def test_a_killed_rank(name: str, tmp_path: Path) -> None:
    """The launcher ends the job at once; what was found until then is on disk."""
    mpi = need(name)
    program, pids = started(mpi, mpi.command(3, JOB), tmp_path)
    os.kill(pids[2], signal.SIGKILL)
    killed = time.monotonic()
    outcome = program.finish(LIMIT)
    assert time.monotonic() - killed < 10, str(outcome)
    assert outcome.code != 0, str(outcome)
    record = written(tmp_path)
    assert record["state"] in ("running", "ended by the launcher")
    if record["state"] == "ended by the launcher":
        found = [fault["found"] for it in record["checks"] for fault in it["faults"]]
        assert any(f"pid {pids[2]}) is gone" in text for text in found), found


def test_other_code_on_a_rank(tmp_path: Path) -> None:
    """A PYTHONPATH that puts another Lockstep before the right one, on one rank."""
    mpi = need("openmpi")
    shadow = tmp_path / "shadow"
    shutil.copytree(ROOT / "src" / "lockstep", shadow / "lockstep")
    with (shadow / "lockstep" / "models.py").open("a") as file:
        file.write("\n# edited\n")
    odd = ["-n", "1", "-x", f"PYTHONPATH={shadow}", mpi.python, JOB, *PATIENT]
    command = [*mpi.command(2, JOB, *PATIENT), ":", *odd]
    outcome = Program(command, mpi.environment(), tmp_path).finish(LIMIT)
    assert outcome.code == 1, str(outcome)
    result = Result(outcome, written(tmp_path))
    assert result.check("software")["verdict"] == "failed"
    assert re.search(r"Lockstep is \w+ on rank 2 ", result.faults("software")), str(outcome)
    assert result.check("torch")["verdict"] == "ok"


def test_too_few_cores(tmp_path: Path) -> None:
    """All ranks on one core, by taskset around mpirun."""
    mpi = need("openmpi")
    core = min(os.sched_getaffinity(0))
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("this machine has one core")
    command = ["taskset", "-c", str(core), *mpi.command(2, JOB, *PATIENT)]
    outcome = Program(command, mpi.environment(), tmp_path).finish(LIMIT)
    result = Result(outcome, written(tmp_path))
    assert f"2 ranks on 1 core ({core}) of the" in result.faults("cpus"), str(outcome)


def test_two_ranks_on_one_core_of_three(tmp_path: Path) -> None:
    """Two ranks are bound to one core, the third has another."""
    mpi = need("openmpi")
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        pytest.skip("this machine has one core")
    parts = [["taskset", "-c", str(core), mpi.python, JOB, *PATIENT] for core in cores]
    command = [mpi.mpirun, "-n", "1", *parts[0], ":", "-n", "2", *parts[1]]
    outcome = Program(command, mpi.environment(), tmp_path).finish(LIMIT)
    result = Result(outcome, written(tmp_path))
    assert re.search(rf"ranks 1, 2 \(.*\) share core {cores[1]}", result.faults("cpus")), str(
        outcome
    )


def test_too_few_open_files(tmp_path: Path) -> None:
    """`ulimit -n 100`: named, with what to type."""
    mpi = need("openmpi")
    script = 'ulimit -n 100; exec "$@"'
    command = [mpi.mpirun, "-n", "2", "bash", "-c", script, "bash"]
    command += [mpi.python, JOB, *PATIENT]
    outcome = Program(command, mpi.environment(), tmp_path).finish(LIMIT)
    assert outcome.code == 1, str(outcome)
    result = Result(outcome, written(tmp_path))
    assert "100 open files allowed" in result.faults("memory"), str(outcome)
    assert "ulimit -n 4096" in result.check("memory")["faults"][0]["cure"]


def test_small_limits(tmp_path: Path) -> None:
    """Checks that have no time are not run, which counts as failed; nothing hangs."""
    result = smoke(need("openmpi"), 2, tmp_path, "--within", "1.5")
    assert result.outcome.code == 1, str(result.outcome)
    assert result.check("data")["verdict"] == "not run"
    assert "1.5 s for all checks are over" in result.check("data")["summary"]


def test_shared_directory_that_is_not_there(tmp_path: Path) -> None:
    """Named, with the path."""
    result = smoke(need("openmpi"), 2, tmp_path, "--shared", "/nonexistent/dir", *PATIENT)
    assert result.outcome.code == 1, str(result.outcome)
    assert "/nonexistent/dir does not exist" in result.faults("path")
    assert result.check("torch")["verdict"] == "ok"


def test_damaged_data(tmp_path: Path) -> None:
    """A file of MNIST that is not what its checksum says; CIFAR-10 is missing."""
    raw = tmp_path / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    (raw / "train-images-idx3-ubyte").write_bytes(b"nothing")
    result = smoke(need("openmpi"), 2, tmp_path, "--data-dir", str(tmp_path / "data"), *PATIENT)
    assert result.outcome.code == 1, str(result.outcome)
    assert "MNIST is damaged" in result.faults("data")
    assert "CIFAR-10 is not in" in result.faults("data")


def test_broken_launch(tmp_path: Path) -> None:
    """The mpirun of another MPI: it could not run, code 2, in the words of the launch."""
    starter, library = need("mpich"), need("openmpi")
    command = [starter.mpirun, "-n", "2", library.python, JOB]
    outcome = Program(command, starter.environment(), tmp_path).finish(LIMIT)
    assert not outcome.timed_out, str(outcome)
    assert outcome.code == 2, str(outcome)
    assert "smoke test: could not run" in outcome.text
    assert "broken launch" in outcome.text


def test_help_starts_no_mpi(tmp_path: Path) -> None:
    """--help answers without a launcher, an unknown flag is refused with code 2."""
    mpi = need("openmpi")
    for flag, code in (("--help", 0), ("--nonsense", 2)):
        done = subprocess.run(
            [mpi.python, JOB, flag],
            check=False,
            env=mpi.environment(),
            capture_output=True,
            timeout=LIMIT,
        )
        assert done.returncode == code, done.stderr
