"""A job over several hosts that hangs: the verdict names rank and host, and all hosts are clean."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from hosts_fixtures import Hosts
from labtools import until
from launching import ROOT, Launcher, Program, need

HANGING = str(ROOT / "tests" / "jobs" / "programs" / "hanging.py")
# Seconds to start Python and torch on all hosts, on a machine that others use as well.
START = 120.0
LIMIT = 5.0
# Seconds from the limit to the end of all processes, on the host that is cut off too.
CLEAN = 60.0


def start(hosts: Hosts, mpi: Launcher, tmp_path: Path, *program: object) -> Program:
    """Start a program, one rank on each of three hosts."""
    spelling = {"impi": "intel"}.get(mpi.name, mpi.name)
    file = hosts.hostfile(spelling, hosts.names[:3])
    option = {"openmpi": "--hostfile", "mpich": "-f", "impi": "-machinefile"}[mpi.name]
    command = [mpi.mpirun, option, file, "-n", 3, mpi.python, *program]
    # Every rank on a host of its own, also where the tests tell Open MPI to fill up one host.
    env = mpi.environment(PRTE_MCA_rmaps_default_mapping_policy="slot:oversubscribe")
    return hosts.start(command, tmp_path, env=env)


@pytest.mark.parametrize("backend", ["mpi", "gloo"])
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("kill", r"rank 1 \({host}\) is gone"),
        ("stop", r"rank 1 \({host}\) is stopped|rank 1 \({host}\): no answer from there"),
        ("loop", r"rank 1 \({host}\) has not entered all_reduce #6|rank 1 \({host}\) is in hang"),
        ("exit", r"rank 1 \({host}\) has left by exit code 3|rank 1 of 3.*leaves with code 3"),
        ("skip", r"rank 1 \({host}\) has closed the session"),
    ],
)
def test_a_rank_on_another_host(
    hosts: Hosts, tmp_path: Path, how: str, said: str, backend: str
) -> None:
    """Nothing of it can be read in shared memory; its own watcher, or its silence, tells."""
    if (how, backend) == ("skip", "gloo"):
        pytest.skip("over gloo the session's end waits for all ranks, so that nobody closes early")
    program = start(hosts, need("openmpi"), tmp_path, HANGING, how, backend, LIMIT)
    outcome = program.finish(START)
    assert outcome.code != 0, outcome
    assert not outcome.timed_out, outcome
    assert re.search(said.format(host=hosts.names[1]), outcome.text), outcome
    until(lambda: not hosts.leftovers(), f"no process left: {hosts.leftovers()}", CLEAN)


@pytest.mark.parametrize(
    ("name", "backend"),
    [("openmpi", "mpi"), ("mpich", "mpi"), ("impi", "mpi"), ("openmpi", "gloo")],
)
def test_a_cut_cable(hosts: Hosts, tmp_path: Path, name: str, backend: str) -> None:
    """In a program that does nothing but sum."""
    program = start(hosts, need(name), tmp_path, HANGING, "cut", backend, LIMIT)
    program.wait_for("waiting", 3, START)
    cut(hosts, program)


@pytest.mark.parametrize(
    ("job", "name", "backend"),
    [("sync_sgd", "mpich", "mpi"), ("mnist_ddp", "openmpi", "mpi"), ("mnist_ddp", "impi", "gloo")],
)
def test_a_cut_cable_in_a_training(
    hosts: Hosts, tmp_path: Path, job: str, name: str, backend: str
) -> None:
    """In the middle of an epoch."""
    flags = ["--backend", backend, "--timeout", LIMIT, "--epochs", 1000, "--channels-last", "off"]
    path = ROOT / "jobs" / f"{job}.py"
    program = start(hosts, need(name), tmp_path, path, *flags, "--run-dir", hosts.shared)
    program.wait_for("Train Epoch: 2", 1, START)
    cut(hosts, program)


def cut(hosts: Hosts, program: Program) -> None:
    """Cut a cable: the verdict comes within the limit and 5 s; the ranks on both sides end."""
    hosts.fault(hosts.names[1], "cut")
    moment = time.monotonic()
    expected = rf"rank 1 \({hosts.names[1]}\): no answer from there"
    until(lambda: re.search(expected, program.text()), "the verdict", LIMIT + 5 + 10)
    said = time.monotonic() - moment
    # Not its code: Open MPI's launcher returns 0 after it has lost a host.
    outcome = program.finish(START)
    assert not outcome.timed_out, outcome

    def ranks() -> list[str]:
        # ssh, on either side of a cut cable, learns of it only when TCP gives up
        return [it for it in hosts.leftovers() if "ssh -x" not in it and "sshd:" not in it]

    until(lambda: not ranks(), f"no process left: {ranks()}", CLEAN)
    print(f"the verdict came {said:.1f} s after the cut, with a limit of {LIMIT:g} s")
