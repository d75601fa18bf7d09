"""A job that hangs says which rank is late and where, within its limit, and ends.

What goes wrong in training jobs, with each MPI and over gloo, is in test_faults.py.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from launching import Outcome, Program, need

PROGRAM = Path(__file__).parent / "programs" / "hanging.py"
# Seconds to start Python and torch on all ranks, on a machine that others use as well.
START = 90.0
LIMIT = 4.0
# Seconds that the verdict and the end may take beyond the limit.
MORE = 12.0

NAME = r"rank 1 \([^)]+\)"
# What goes wrong, and what the verdict has to say, over mpi.
CASES = {
    "loop": rf"{NAME} has not entered all_reduce #6 of group 0 \(float32\[1000\], "
    r"hanging.py:\d+\); it is in hanging.py:2[67] since \d+ s\n +2 others wait there",
    "no-interpreter": rf"{NAME} has not entered all_reduce #6 [^\n]*hanging.py:\d+[^\n]*"
    "which does not let go of the interpreter",
    "skip": rf"{NAME} has closed the session",
    # rank 2 waits for rank 0, which waits for rank 1
    "subgroup": rf"(limit of|cannot end)[^\n]*\n +{NAME} has not entered all_reduce #1 of group "
    r"\d+ [^\n]*; it is in hanging.py:\d+[^\n]*\n +1 other waits there",
    "message": rf"{NAME} has not entered all_reduce #6 [^\n]*hanging.py:\d+\)",
}


def run(how: str, directory: Path) -> Outcome:
    """Run the program; it has to end soon after the limit, with a code that is not 0."""
    mpi = need("openmpi")
    command = mpi.command(3, str(PROGRAM), how, "mpi", str(LIMIT))
    outcome = Program(command, mpi.environment(), directory).finish(START)
    ended = time.time()
    assert not outcome.timed_out, str(outcome)
    assert outcome.code != 0, str(outcome)
    event = max(float(at) for at in re.findall(r"event (\d+\.\d+)", outcome.text))
    assert ended - event < LIMIT + MORE, f"{ended - event:.1f} s after the event; {outcome}"
    return outcome


@pytest.mark.parametrize("how", list(CASES))
def test_a_rank_is_late(how: str, tmp_path: Path) -> None:
    """It is named, with the call that it has not entered, and where it is instead."""
    outcome = run(how, tmp_path)
    assert re.search(CASES[how], outcome.text), str(outcome)


@pytest.mark.parametrize(
    ("backend", "how", "said"),
    [
        ("mpi", "other-shape", r"rank 1 called all_reduce #6 \(float32\[10, 100\]"),
        (
            "gloo",
            "verb",
            r"rank 1 called broadcast #6 \(float32\[1000\], root 0\), where the others ",
        ),
        ("gloo", "other-shape", r"rank 1 called all_reduce #6 \(float32\[10, 100\]"),
    ],
)
def test_check_mode(backend: str, how: str, said: str, tmp_path: Path) -> None:
    """LOCKSTEP_CHECK=1: what differs is found at the call, long before a limit of 60 s."""
    mpi = need("openmpi")
    command = mpi.command(3, str(PROGRAM), how, backend, "60")
    environment = mpi.environment(LOCKSTEP_CHECK="1")
    outcome = Program(command, environment, tmp_path).finish(START)
    assert outcome.code != 0, str(outcome)
    assert not outcome.timed_out, str(outcome)
    assert re.search(said, outcome.text), str(outcome)


def test_check_mode_names_a_rank_that_does_not_come(tmp_path: Path) -> None:
    """Over gloo the ranks wait for it in the comparison."""
    mpi = need("openmpi")
    command = mpi.command(3, str(PROGRAM), "loop", "gloo", str(LIMIT))
    outcome = Program(command, mpi.environment(LOCKSTEP_CHECK="1"), tmp_path).finish(START)
    assert outcome.code != 0, str(outcome)
    assert not outcome.timed_out, str(outcome)
    late = rf"{NAME} has not entered all_reduce #6 of group 0 [^\n]*; it is in hanging.py:\d+"
    assert re.search(rf"(limit of 4 s|cannot end)\n +{late}", outcome.text), str(outcome)


@pytest.mark.parametrize("started", ["", "trap '' QUIT; "], ids=["usually", "with & by a script"])
def test_sigquit_asks_and_ends_nothing(started: str, tmp_path: Path) -> None:
    """SIGQUIT to any rank has the verdict printed; the job goes on to its end."""
    mpi = need("openmpi")
    command = mpi.command(3, str(PROGRAM), "quit", "mpi", "60")
    command = ["bash", "-c", f'{started}exec "$@"', "bash", *command]
    program = Program(command, mpi.environment(), tmp_path)
    program.wait_for("waiting", 3, START)
    time.sleep(1.0)  # until the others wait in all_reduce, while rank 1 sleeps for 8 s
    ranks = _ranks_of(program)
    assert len(ranks) == 3
    os.kill(ranks[-1], signal.SIGQUIT)
    outcome = program.finish(START)
    assert outcome.code == 0, str(outcome)
    assert "SIGQUIT: what the ranks are doing" in outcome.text, str(outcome)
    assert re.search(rf"{NAME} has not entered all_reduce #6", outcome.text), str(outcome)


def test_waits_on_if_asked(tmp_path: Path) -> None:
    """With LOCKSTEP_WATCHDOG=wait the verdict at the limit ends nothing."""
    mpi = need("openmpi")
    command = mpi.command(3, str(PROGRAM), "quit", "mpi", "2")
    environment = mpi.environment(LOCKSTEP_WATCHDOG="wait")
    outcome = Program(command, environment, tmp_path).finish(START)
    assert outcome.code == 0, str(outcome)
    assert re.search(rf"limit of 2 s\n +{NAME} has not entered all_reduce #6", outcome.text)


def _ranks_of(program: Program) -> list[int]:
    """Return the processes that run the test program in Python, below the launcher."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == program.process.pid and str(PROGRAM).encode() in words:
            found.append(int(entry.name))
    return sorted(found)
