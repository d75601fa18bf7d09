"""Submit jobs to the Slurm that slurm-lab starts, and follow them. Everything here has a limit."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from launching import ROOT, need

LAB = Path(__file__).with_name("slurm-lab")
CANNOT = 77
# Slurm states from which a job does not come back.
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL"}
# Variables of an outer Slurm, launcher or user that would change what is tested here.
_FOREIGN = re.compile(r"(SLURM(?!_LAB)|SBATCH|SRUN|OMPI_|PMI|PRTE_|LOCKSTEP_|MPI|HYD|I_MPI|PYTEST)")


def lab(action: str, *arguments: str, limit: float = 120.0) -> str:
    """Call slurm-lab; skip the test where such a Slurm cannot be had, fail where it breaks."""
    command = [str(LAB), action, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    if done.returncode == CANNOT:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, f"{shlex.join(command)}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    """Return a Slurm of 4 nodes; one that was up before stays up."""
    outside = {k: v for k, v in os.environ.items() if not _FOREIGN.match(k)}
    is_up = subprocess.run([str(LAB), "exec", "true"], capture_output=True, timeout=30, check=False)
    try:
        # Long enough for a machine that has to install Slurm first.
        lab("up", limit=420.0)
        yield Slurm(outside)
    finally:
        if is_up.returncode:
            lab("down")


@dataclass(frozen=True)
class Slurm:
    """A Slurm that is up.

    Attributes:
        environment: of its users.
    """

    environment: dict[str, str]

    def call(self, *command: str, limit: float = 30.0, env: dict[str, str] | None = None) -> str:
        """Run a command on the login node, in the checkout; return what it printed."""
        done = subprocess.run(
            [str(LAB), "exec", *command],
            env=env or self.environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
        )
        assert done.returncode == 0, f"{shlex.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout

    def variables(self, mpi: str, directory: Path, **extra: str) -> dict[str, str]:
        """Return the environment in which a user of an MPI submits; skip where it is not here."""
        return {
            **self.environment,
            "MPI": mpi,
            "LOCKSTEP_VENV": str(need(mpi).venv),
            "LOCKSTEP_SITE": "/dev/null",
            "LOCKSTEP_RUNS": str(directory / "runs"),
            **extra,
        }

    def submit(
        self,
        script: str,
        *arguments: str,
        directory: Path,
        mpi: str = "openmpi",
        options: tuple[str, ...] = (),
        **extra: str,
    ) -> Job:
        """Submit slurm/SCRIPT.sbatch as a user would, with its runs and its log in a directory.

        Args:
            script: name of the sbatch file.
            arguments: of the program.
            directory: for run directories and the log.
            mpi: which MPI; the test is skipped if it is not here.
            options: of sbatch.
            extra: variables, such as LOCKSTEP_LAUNCH.
        """
        variables = self.variables(mpi, directory, **extra)
        file = str(ROOT / "slurm" / f"{script}.sbatch")
        log = f"--output={directory}/%x-%j.log"
        said = self.call("sbatch", "--parsable", log, *options, file, *arguments, env=variables)
        number = said.strip().partition(";")[0]
        runs = directory / "runs"
        return Job(self, number, directory / f"{script}-{number}.log", runs / f"{script}-{number}")


@dataclass(frozen=True)
class Job:
    """A job that was submitted.

    Attributes:
        slurm: where.
        number: its id.
        log: what it prints.
        run: its run directory, there once it has started.
    """

    slurm: Slurm
    number: str
    log: Path
    run: Path

    def shown(self) -> dict[str, str]:
        """Return what `scontrol show job` says."""
        line = self.slurm.call("scontrol", "show", "job", "-o", self.number)
        return dict(re.findall(r"(\w+(?::\w+)?)=(\S*)", line))

    def text(self) -> str:
        """Return what the log holds so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def wait_until(self, what: str, limit: float, count: int = 1) -> None:
        """Wait until the log holds a text so many times; fail if the job ends before."""
        end = time.monotonic() + limit
        while self.text().count(what) < count:
            # The state first: what an ended job has printed is in the log by then.
            ended = self.shown()["JobState"] in ENDED and self.text().count(what) < count
            if ended or time.monotonic() > end:
                pytest.fail(f"{what!r} is not there {count} times, {self}")
            time.sleep(0.2)

    def finish(self, limit: float) -> str:
        """Wait for the end that is for good; return the state."""
        end = time.monotonic() + limit
        while (state := self.shown()["JobState"]) not in ENDED:
            if time.monotonic() > end:
                shown = str(self)
                self.slurm.call("scancel", self.number)
                pytest.fail(f"not ended after {limit} s, {shown}")
            time.sleep(0.2)
        return state

    def must_be_done(self, limit: float) -> None:
        """Wait for the end, and see to it that it was a good one."""
        state = self.finish(limit)
        assert state == "COMPLETED", str(self)
        assert (self.run / "DONE").exists(), str(self)

    def __str__(self) -> str:
        return f"job {self.number}: {self.shown()}\n{self.text()[-20_000:]}"
