"""The smoke test on several hosts: each fault is named, with its host; nothing hangs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hosts_fixtures import Hosts
from launching import Launcher, Program, need
from smoke_result import Result

# Seconds; the machine that plays all the hosts may be busy with other things too.
LIMIT = 200.0
PATIENT = ("--within", "150", "--limit", "90")


def start(
    hosts: Hosts, mpi: Launcher, names: list[str], directory: Path, *flags: str, options: Any = ()
) -> Program:
    """Start the smoke test with a rank on each of the hosts."""
    spelling = {"openmpi": "openmpi", "mpich": "mpich", "impi": "intel"}[mpi.name]
    file = hosts.hostfile(spelling, names)
    how = ["--map-by", "slot", "--hostfile"] if mpi.name == "openmpi" else ["-f"]
    how += [str(file), "-n", str(len(names))]
    command = [mpi.mpirun, *how, *options, mpi.python, "jobs/smoke.py"]
    shared = hosts.shared / "runs"
    return hosts.start(
        [*command, "--run-dir", str(shared), *flags], directory, env=mpi.environment(COLUMNS="200")
    )


def smoke(
    hosts: Hosts, names: list[str], directory: Path, *flags: str, options: Any = ()
) -> Result:
    """Run the smoke test on hosts to its end."""
    flags = flags or PATIENT
    program = start(hosts, need("openmpi"), names, directory, *flags, options=options)
    return ended(hosts, program)


def ended(hosts: Hosts, program: Program) -> Result:
    """Wait for the end, and read what was written."""
    outcome = program.finish(LIMIT)
    assert not outcome.timed_out, str(outcome)
    written = sorted((hosts.shared / "runs").glob("smoke-*/smoke.json"))
    assert len(written) == 1, str(outcome)
    record = json.loads(written[0].read_text())
    return Result(outcome, record)


@pytest.mark.parametrize("name", ["openmpi", "mpich"])
def test_healthy(name: str, hosts: Hosts, tmp_path: Path) -> None:
    """Two hosts: no check fails, and there is a link between them."""
    result = ended(hosts, start(hosts, need(name), hosts.names[:2], tmp_path, *PATIENT))
    assert result.outcome.code == 0, str(result.outcome)
    assert result.record["nodes"] == 2
    assert {it["verdict"] for it in result.record["checks"]} <= {"ok", "warning", "not applicable"}
    (link,) = result.check("network")["details"]["links"]
    assert link["between"] == hosts.names[:2]
    assert link["bandwidth_MB_s"] > 0
    assert result.check("path")["details"]["rendezvous"].startswith("file:///")
    page = next((hosts.shared / "runs").glob("smoke-*/smoke.html")).read_text()
    assert page.count("<svg ") >= 4


def test_directory_missing_on_one_host(hosts: Hosts, tmp_path: Path) -> None:
    """The shared directory is not mounted there."""
    hosts.fault(hosts.names[1], "no-share")
    result = smoke(hosts, hosts.names[:2], tmp_path)
    assert result.outcome.code == 1, str(result.outcome)
    assert hosts.names[1] in result.faults("path"), result.faults("path")
    assert "does not exist" in result.faults("path")
    assert hosts.names[0] not in result.faults("path")


def test_another_directory_on_one_host(hosts: Hosts, tmp_path: Path) -> None:
    """The path is there, but it is not the same directory."""
    hosts.fault(hosts.names[1], "other-share")
    hosts.run(hosts.names[1], "mkdir", "-p", hosts.shared / "runs")
    result = smoke(hosts, hosts.names[:2], tmp_path)
    assert result.outcome.code == 1, str(result.outcome)
    assert f"({hosts.names[1]})" in result.faults("path"), result.faults("path")
    assert "is not the directory that the root sees" in result.faults("path")


def test_no_locks(hosts: Hosts, tmp_path: Path) -> None:
    """A file system without locks across hosts: training goes on by TCP, so it is a warning."""
    hosts.fault(hosts.names[1], "no-locks")
    result = smoke(hosts, hosts.names[:2], tmp_path)
    assert "locks do not hold" in result.faults("path"), str(result.outcome)
    assert result.check("path")["details"]["rendezvous"] == "tcp"
    assert result.check("path")["details"]["file system"][hosts.names[1]] == "fuse.sshfs"


def test_slow_link(hosts: Hosts, tmp_path: Path) -> None:
    """Of three hosts, the one with a slow cable is named, and nobody else."""
    hosts.fault(hosts.names[2], "slow", "100mbit")
    result = smoke(hosts, hosts.names[:3], tmp_path)
    assert f"{hosts.names[2]}: all its links are slow" in result.faults("network"), str(
        result.outcome
    )
    assert hosts.names[1] not in result.faults("network")


def test_slow_rank(hosts: Hosts, tmp_path: Path) -> None:
    """A host whose core others use too is named, and what uses it."""
    hosts.fault(hosts.names[1], "busy")
    # or mpirun would bind its rank to another core than the busy one
    result = smoke(hosts, hosts.names[:2], tmp_path, options=["--bind-to", "none"])
    assert "times as slow as the median" in result.faults("cpus"), str(result.outcome)
    assert hosts.names[1] in result.faults("cpus")
    assert "busy there: sh (pid" in result.faults("cpus")


def test_small_shm(hosts: Hosts, tmp_path: Path) -> None:
    """/dev/shm of 1 MiB."""
    hosts.fault(hosts.names[1], "small-shm", "1m")
    result = smoke(hosts, hosts.names[:2], tmp_path)
    assert result.outcome.code == 1, str(result.outcome)
    assert result.check("memory")["verdict"] == "failed"
    assert f"{hosts.names[1]}: " in result.faults("memory")
    assert "/dev/shm" in result.faults("memory")
    assert hosts.names[0] not in result.faults("memory")


def test_loopback_name(hosts: Hosts, tmp_path: Path) -> None:
    """127.0.1.1, as Debian's installer writes it: named, and gloo works all the same."""
    hosts.fault(hosts.names[1], "loopback-name")
    result = smoke(hosts, hosts.names[:2], tmp_path)
    assert result.outcome.code == 0, str(result.outcome)
    assert f"on {hosts.names[1]} its own name means 127.0.1.1" in result.faults("network")
    assert result.check("torch")["verdict"] == "ok"


def test_decoy(hosts: Hosts, tmp_path: Path) -> None:
    """An interface with one address everywhere: gloo's is another, and all pairs connect."""
    hosts.fault("all", "decoy")
    options = ["--mca", "btl_tcp_if_include", "eth0"]
    result = smoke(hosts, hosts.names[:2], tmp_path, options=options)
    assert result.outcome.code == 0, str(result.outcome)
    assert result.check("network")["details"]["interfaces"][hosts.names[0]]["docker0"]
    assert result.check("torch")["verdict"] == "ok"


def test_cut_cable(hosts: Hosts, tmp_path: Path) -> None:
    """A host that is cut off in the middle: its rank is named, the rest goes on to a verdict."""
    mpi = need("openmpi")
    program = start(hosts, mpi, hosts.names[:3], tmp_path, "--limit", "6")
    program.wait_for("path", 1, LIMIT)
    hosts.fault(hosts.names[2], "cut")
    # The launcher itself waits for the host that is gone; nothing that it has started does.
    program.wait_for("smoke test: failed after", 1, LIMIT)
    program.end()
    result = ended(hosts, program)
    assert result.record["seconds"] < 60, str(result.outcome)
    lost = [
        fault["found"]
        for check in result.record["checks"]
        for fault in check["faults"]
        if "does not answer" in fault["found"]
    ]
    assert len(lost) == 1, str(result.outcome)
    assert lost[0].startswith(f"rank 2 ({hosts.names[2]}, pid "), lost
    assert result.record["state"] == "done"
    assert any(it["verdict"] == "not run" for it in result.record["checks"])
