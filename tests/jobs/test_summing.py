"""Ranks that sum in shared memory: a lost one is named, and no memory is left behind."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from pathlib import Path

import pytest

from launching import Outcome, Program, need

PROGRAM = Path(__file__).parent / "programs" / "summing.py"
# Seconds to start; the limit of a sum; and what a loaded machine may take to end the job.
START, LIMIT, END = 90.0, 2.0, 30.0
RANKS = 3

MPIS = pytest.mark.parametrize("name", ["openmpi", "mpich", "impi"])


def start(name: str, how: str, directory: Path) -> tuple[Program, list[int]]:
    """Start the program, wait until all ranks sum, and return their process ids, by rank."""
    mpi = need(name)
    program = Program(mpi.command(RANKS, str(PROGRAM), how), mpi.environment(), directory)
    program.wait_for("summing: rank", RANKS, START)
    found = dict(re.findall(r"summing: rank (\d+) pid (\d+)", program.text()))
    return program, [int(found[str(rank)]) for rank in range(RANKS)]


def holders() -> set[int]:
    """Return the processes that hold memory of ours for gradients; it has no name to look for."""
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if "memfd:lockstep: gradients" in maps.read_text():
                found.add(int(maps.parent.name))
        except OSError:
            continue  # it has ended meanwhile, or is another user's
    return found


def nothing_is_left(pids: list[int], named: set[str], outcome: Outcome) -> None:
    """Check that the ranks are gone, that memory goes with them, and that no name stays."""
    end = time.monotonic() + END
    while holders() & set(pids) and time.monotonic() < end:
        time.sleep(0.05)
    assert not holders() & set(pids), str(outcome)
    assert {it for it in os.listdir("/dev/shm") if "lockstep" in it} <= named, str(outcome)


@MPIS
@pytest.mark.parametrize("how", ["end", "raise", "abort", "kill"])
def test_no_memory_is_left_behind(name: str, how: str, tmp_path: Path) -> None:
    """After a normal end, an exception, an abort, a SIGKILL."""
    named = {it for it in os.listdir("/dev/shm") if "lockstep" in it}
    program, pids = start(name, how, tmp_path)
    if how == "kill":
        assert set(pids) <= holders()
        os.kill(pids[0], signal.SIGKILL)
    outcome = program.finish(START)
    assert not outcome.timed_out, str(outcome)
    assert (outcome.code == 0) == (how == "end"), str(outcome)
    nothing_is_left(pids, named, outcome)


@MPIS
def test_a_stopped_rank_is_named(name: str, tmp_path: Path) -> None:
    """At a random moment, within the limit of a sum; then the job ends."""
    program, pids = start(name, "for ever", tmp_path)
    end_of_pause = time.monotonic() + random.uniform(0.0, 0.3)
    while time.monotonic() < end_of_pause:
        time.sleep(0.001)
    rank = random.randrange(RANKS)
    os.kill(pids[rank], signal.SIGSTOP)
    stopped = time.monotonic()
    try:
        program.wait_for("CollectiveTimeout: sum of gradients", 1, LIMIT + END)
        took = time.monotonic() - stopped
    finally:
        os.kill(pids[rank], signal.SIGKILL)  # a launcher may wait for it
    outcome = program.finish(START)
    assert outcome.code != 0, str(outcome)
    named = rf"hit its timeout of 2 s: rank {rank} has (not come|stopped in it)"
    assert re.search(named, outcome.text), str(outcome)
    assert took < LIMIT + END
    nothing_is_left(pids, set(os.listdir("/dev/shm")), outcome)
