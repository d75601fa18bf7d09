"""How a process of another rank ended."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from lockstep.watchdog.life import Life


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that sleeps, or ends with code 3 when it is told to."""
    code = "import sys; sys.stdin.read(1); sys.exit(3)"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def _until_gone(life: Life) -> None:
    end = time.monotonic() + 10
    while not life.gone and time.monotonic() < end:
        time.sleep(0.01)
    assert life.gone


def test_how_a_process_ended(child: subprocess.Popen[bytes]) -> None:
    """Stopped, then killed; the kernel says by what, or says nothing."""
    life = Life(child.pid)
    assert not life.gone
    child.send_signal(signal.SIGSTOP)
    end = time.monotonic() + 10
    while not life.stopped and time.monotonic() < end:
        time.sleep(0.01)
    assert life.stopped
    child.kill()
    _until_gone(life)
    assert life.how() == "SIGKILL, signal 9"  # not reaped yet: every kernel tells


def test_exit_code_of_a_process(child: subprocess.Popen[bytes]) -> None:
    """Likewise."""
    life = Life(child.pid)
    assert child.stdin is not None
    child.stdin.write(b"x")
    child.stdin.close()
    _until_gone(life)
    assert life.how() == "exit code 3"
