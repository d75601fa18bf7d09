"""Stacks that other processes are asked for, and where these say that they are."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockstep.watchdog import stacks

PROGRAM = """
import sys, threading, time
from lockstep.watchdog import stacks

def wait():
    while True: time.sleep(0.01)

def outer():
    print(stacks.offer(), flush=True)
    spin()

def spin():
    while True: pass

threading.Thread(target=wait, daemon=True).start()
outer()
"""
PLACE = f"busy.py:{PROGRAM.splitlines().index('    while True: pass') + 1}"


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[list[tuple[int, int]]]:
    """Three processes that spin and offer their stacks: process id and descriptor of each."""
    path = tmp_path / "busy.py"
    path.write_text(PROGRAM)
    command = [sys.executable, str(path)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    yield [(it.pid, int(it.stdout.readline())) for it in processes if it.stdout]
    for process in processes:
        process.kill()
        process.communicate()


def test_where_many_are(busy: list[tuple[int, int]]) -> None:
    """All at once; one that is stopped, or does not offer, or is no process, is unknown."""
    _until(lambda: set(stacks.places(dict(enumerate(busy))).values()) == {PLACE})
    stopped = busy[1][0]
    os.kill(stopped, signal.SIGSTOP)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        asked = {**dict(enumerate(busy)), 3: (other.pid, 0), 4: (2**22 + 1, 3)}
        assert stacks.places(asked) == {0: PLACE, 1: "", 2: PLACE, 3: "", 4: ""}
        assert other.poll() is None
        other.communicate()
    os.kill(stopped, signal.SIGCONT)


def test_whole_stacks(busy: list[tuple[int, int]]) -> None:
    """Of all threads, the main one last; asked again, it is not the old answer too."""
    _until(lambda: stacks.places({0: busy[0]}) == {0: PLACE})
    asked: list[int] = []
    for _ in range(2):
        text = stacks.fetch({7: busy[0]}, asked.append)[7]  # who hears nothing gets a signal
        assert text.count("(most recent call first)") == 2
        assert re.findall(r" in (spin|outer|<module>)\n", text) == ["spin", "outer", "<module>"]
    assert asked == [7, 7]


def test_stacks_of_this_process() -> None:
    """It need not ask."""
    stacks.offer()
    assert "in test_stacks_of_this_process" in stacks.own()
    assert stacks.own().count("in test_stacks_of_this_process") == 1


def test_a_crash_leaves_its_stack(busy: list[tuple[int, int]]) -> None:
    """It is read when the process is gone; who is killed leaves none."""
    crashed, killed = (stacks.keep(*it) for it in busy[:2])
    os.kill(busy[0][0], signal.SIGABRT)
    os.kill(busy[1][0], signal.SIGKILL)
    _until(lambda: stacks.place(stacks.of_crash(crashed)).startswith("busy.py:"))
    assert stacks.of_crash(killed) == ""


def _until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 10.0
    while not true() and time.monotonic() < end:
        time.sleep(0.01)
    assert true()
