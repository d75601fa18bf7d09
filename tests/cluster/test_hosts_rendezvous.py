"""gloo over several hosts, which meet in a file on a shared path: what may be wrong there."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest

from hosts_fixtures import Hosts
from launching import ROOT, Launcher, Program, need

MEETING = str(ROOT / "tests" / "jobs" / "programs" / "meeting.py")
# Seconds to start Python and torch on all hosts, on a machine that others use as well.
LIMIT = 240.0


@pytest.fixture
def mpi() -> Launcher:
    """Return Open MPI."""
    return need("openmpi")


def start(
    hosts: Hosts, mpi: Launcher, tmp_path: Path, *program: object, count: int = 2, name: str = "out"
) -> Program:
    """Start a program, a rank a host, on the first few hosts."""
    file = hosts.hostfile("openmpi", hosts.names[:count])
    command = [mpi.mpirun, "--hostfile", file, "-n", count, mpi.python, *program]
    # docker0 in one test; Open MPI has to be told, gloo has not
    env = mpi.environment(OMPI_MCA_btl_tcp_if_include="eth0")
    return hosts.start(command, tmp_path, env=env, name=name)


def url(hosts: Hosts) -> str:
    """Return the meeting point."""
    return f"file://{hosts.shared}"


def left(hosts: Hosts) -> list[str]:
    """Return what starts have left in the shared directory."""
    return sorted(path.name for path in hosts.shared.iterdir())


def test_a_job_over_three_hosts(hosts: Hosts, mpi: Launcher, tmp_path: Path) -> None:
    """MNIST by DDP over gloo: it learns, the ranks stay in step, and nothing is left."""
    job = ["jobs/mnist_ddp.py", "--data", "sample", "--epochs", "1", "--backend", "gloo"]
    job += ["--init-method", url(hosts), "--run-dir", hosts.shared / "runs", "--timeout", "60"]
    outcome = start(hosts, mpi, tmp_path, *job, count=3).finish(LIMIT)
    assert outcome.code == 0, outcome
    assert "divergence between ranks 0.0" in outcome.text, outcome
    assert "3 ranks on 3 nodes" in outcome.text, outcome
    assert left(hosts) == ["runs"]
    assert hosts.leftovers() == []


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("no-share", "does not exist"),
        ("other-share", "is not the directory that the root sees"),
    ],
)
def test_a_directory_that_is_not_shared(
    hosts: Hosts, mpi: Launcher, tmp_path: Path, fault: str, words: str
) -> None:
    """The host is named, on all ranks alike, and the job ends."""
    hosts.fault(hosts.names[1], fault)
    outcome = start(hosts, mpi, tmp_path, MEETING, url(hosts), "well").finish(LIMIT)
    assert outcome.code not in (0, None), outcome
    assert not outcome.timed_out, outcome
    assert f"rank 1 ({hosts.names[1]}): " in outcome.text, outcome
    assert words in outcome.text, outcome
    assert "open 0" not in outcome.text, outcome
    assert left(hosts) == []


def test_names_that_mean_127_0_1_1(hosts: Hosts, mpi: Launcher, tmp_path: Path) -> None:
    """gloo would look for the others in its own host; it is given the interface that leads out."""
    hosts.fault("all", "loopback-name")
    outcome = start(hosts, mpi, tmp_path, MEETING, url(hosts), "well").finish(LIMIT)
    assert outcome.code == 0, outcome
    assert outcome.text.count("done ") == 2, outcome
    assert "GLOO_SOCKET_IFNAME=eth0 is set" in outcome.text, outcome
    assert "127.0.1.1 means every host itself" in outcome.text, outcome


def test_names_that_mean_docker0(hosts: Hosts, mpi: Launcher, tmp_path: Path) -> None:
    """An address that every host has, and that its name means there, is not taken for a way."""
    hosts.fault("all", "decoy")
    for host in hosts.lab.hosts:
        host.write_hosts(first=f"172.17.0.1 {host.name}")
    try:
        outcome = start(hosts, mpi, tmp_path, MEETING, url(hosts), "well").finish(LIMIT)
    finally:
        for host in hosts.lab.hosts:
            host.write_hosts()
    assert outcome.code == 0, outcome
    assert outcome.text.count("done ") == 2, outcome
    assert "GLOO_SOCKET_IFNAME=eth0 is set" in outcome.text, outcome


def test_a_directory_without_locks(hosts: Hosts, mpi: Launcher, tmp_path: Path) -> None:
    """By sshfs: torch's file would lose records, which is seen before; TCP is used instead."""
    hosts.fault(hosts.names[1], "no-locks")
    outcome = start(hosts, mpi, tmp_path, MEETING, url(hosts), "well").finish(LIMIT)
    assert outcome.code == 0, outcome
    assert outcome.text.count("done ") == 2, outcome
    assert "locks do not hold across hosts" in outcome.text, outcome
    assert "TCP is used instead" in outcome.text, outcome


def kill_all(hosts: Hosts, program: Program) -> None:
    """End a job by SIGKILL on every host at once, as a power cut does."""
    for host in hosts.lab.hosts:
        for pid, line in host.processes().items():
            if "meeting.py" in line:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    program.end()


def test_what_a_killed_job_left_is_not_met(hosts: Hosts, mpi: Launcher, tmp_path: Path) -> None:
    """kill -9 on both hosts leaves its place; the next start has one of its own."""
    killed = start(hosts, mpi, tmp_path, MEETING, url(hosts), "hang", name="killed")
    killed.wait_for("open", 2, LIMIT)
    kill_all(hosts, killed)
    stale = left(hosts)
    assert len(stale) == 1
    assert (hosts.shared / stale[0] / "store").stat().st_size > 0
    outcome = start(hosts, mpi, tmp_path, MEETING, url(hosts), "well").finish(LIMIT)
    assert outcome.code == 0, outcome
    assert outcome.text.count("done ") == 2, outcome
    assert left(hosts) == stale


def test_two_jobs_at_once(hosts: Hosts, mpi: Launcher, tmp_path: Path) -> None:
    """In one directory, over the same hosts: neither meets the other."""
    first = start(hosts, mpi, tmp_path, MEETING, url(hosts), "hang", name="first")
    first.wait_for("open", 2, LIMIT)
    outcome = start(hosts, mpi, tmp_path, MEETING, url(hosts), "well").finish(LIMIT)
    assert first.process.poll() is None, first.text()
    assert len(left(hosts)) == 1
    kill_all(hosts, first)
    assert outcome.code == 0, outcome
    assert outcome.text.count("done ") == 2, outcome
