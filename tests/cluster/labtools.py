"""What the lab of hosts is made with: commands with limits, processes known by their start, apt."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

START = 20.0  # seconds for one step of making a host
# what a host needs, and the Debian package that has it
TOOLS = {
    "/usr/sbin/sshd": "openssh-server",
    "/usr/bin/ssh": "openssh-client",
    "/sbin/ip": "iproute2",
    "/usr/bin/sshfs": "sshfs",
    "/usr/bin/faketime": "faketime",
}


class LabError(RuntimeError):
    """The hosts cannot be made here, or a command in one failed."""


def sh(*command: object, limit: float = START, check: bool = True) -> str:
    """Run a command of the machine and return what it printed."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=limit, stdin=subprocess.DEVNULL, check=False
    )
    if check and done.returncode:
        raise LabError(f"{' '.join(words)}: code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def started(pid: int) -> str:
    """Return when a process was started, in ticks since boot; "" if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


@dataclass(frozen=True)
class Task:
    """A process that the lab started, known by number and start, so that no other is ended."""

    file: Path

    def note(self, pid: int) -> None:
        """Write down a process."""
        self.file.write_text(f"{pid} {started(pid)}\n")

    @property
    def pid(self) -> int:
        """The number outside; 0 if it does not run."""
        try:
            pid, start = self.file.read_text().split()
        except (OSError, ValueError):
            return 0
        return int(pid) if started(int(pid)) == start else 0

    def end(self) -> None:
        """End it at once, wait until it is gone, and forget it."""
        if pid := self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            until(lambda: not self.pid, f"end of process {pid}")
        self.file.unlink(missing_ok=True)


def until(ready: Callable[[], object], what: str, limit: float = START) -> None:
    """Ask until the answer is yes, or fail."""
    end = time.monotonic() + limit
    while not ready():
        if time.monotonic() > end:
            raise LabError(f"{what}: not within {limit:g} s")
        time.sleep(0.02)


def why_not() -> str:
    """Say why no hosts can be made here, or nothing if they can."""
    if os.geteuid() != 0:
        return "several hosts on one machine need root"
    if shutil.which("unshare") is None or shutil.which("nsenter") is None:
        return "unshare and nsenter are missing (util-linux)"
    with contextlib.suppress(subprocess.TimeoutExpired):
        if said := sh("unshare", "-m", "-u", "-i", "-n", "-p", "--fork", "true", check=False):
            return f"no namespaces here: {said.strip()}"
    try:
        install()
    except (LabError, OSError, subprocess.TimeoutExpired) as error:
        return f"what the hosts need cannot be installed: {error}"
    return ""


def install() -> None:
    """Install by apt what is missing; the machine's own sshd is not started by that."""
    missing = [package for file, package in TOOLS.items() if not os.path.exists(file)]
    if not missing:
        return
    with _no_services():
        sh("apt-get", "update", "-q", limit=120)
        words = ["install", "-y", "-q", "--no-install-recommends", *missing]
        sh("env", "DEBIAN_FRONTEND=noninteractive", "apt-get", *words, limit=300)


@contextlib.contextmanager
def _no_services() -> Iterator[None]:
    policy = Path("/usr/sbin/policy-rc.d")
    if policy.exists():
        yield
        return
    policy.write_text("#!/bin/sh\nexit 101\n")
    policy.chmod(0o755)
    try:
        yield
    finally:
        policy.unlink()
