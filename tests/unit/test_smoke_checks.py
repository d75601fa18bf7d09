"""The parts of the smoke test that need one process: limits, helpers, processes, explanations."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from laboratory import lab_of, texts

from lockstep.errors import LockstepError
from lockstep.smoke import (
    processes,
)
from lockstep.smoke.check import Check, Finding, Lab, Options
from lockstep.smoke.compare import by_node, named, odd_ones, spans
from lockstep.smoke.explain import explain
from lockstep.smoke.hands import Answer, Hands


def test_the_worst_fault_is_the_verdict() -> None:
    """A check without faults is ok; not run is worse than a warning."""
    finding = Finding()
    assert finding.verdict == "ok"
    finding.warn("a", "b")
    assert finding.verdict == "warning"
    finding.fail("a", "b")
    finding.warn("c", "d")
    assert finding.verdict == "failed"
    assert Finding(applicable=False).verdict == "not applicable"
    assert Finding(ran=False).verdict == "not run"


def test_limits() -> None:
    """A small limit caps, a large one gives every check more in proportion."""
    place = Path("/shared")
    assert Options(place).limit_of(10.0) == 10.0
    assert Options(place, limit=5.0).limit_of(10.0) == 5.0
    assert Options(place, limit=60.0).limit_of(10.0) == 20.0


def test_naming() -> None:
    """Ranks by number and host."""
    lab = lab_of(4, 2, 1)
    assert spans([0, 1, 2, 3, 5, 6, 9]) == "0-3, 5, 6, 9"
    assert named([4, 5], lab.roster) == "ranks 4, 5 (node1)"
    assert named([0, 6], lab.roster) == "rank 0 (node0), rank 6 (node2)"
    assert by_node(lab.roster) == {0: [0, 1, 2, 3], 1: [4, 5], 2: [6]}
    assert odd_ones({0: "a", 1: "b", 2: "b"}) == ("b", {"a": [0]})
    assert odd_ones({0: "a", 1: "b"}) == ("a", {"b": [1]})


class _Serving:
    """Hands whose work is done by a thread that stands for the main one."""

    def __enter__(self) -> Hands:
        self.hands = Hands()
        threading.Thread(target=self.hands.serve, daemon=True).start()
        return self.hands

    def __exit__(self, *_: object) -> None:
        self.hands.stop()


def test_hands_return_values_and_troubles() -> None:
    """What the work returns, and how it failed."""

    def fail() -> None:
        raise LockstepError("found", cure="cure")

    with _Serving() as hands:
        assert hands.do(lambda: 7, 5.0).value == 7
        answer = hands.do(fail, 5.0)
        assert (answer.trouble, answer.cure, answer.good) == ("found", "cure", False)
        assert "ZeroDivisionError" in hands.do(lambda: 1 / 0, 5.0).trouble
        assert not hands.stuck


def test_hands_leave_work_that_hangs() -> None:
    """It is given up at its limit, with where it stands; other work is still done."""
    never = threading.Event()
    with _Serving() as hands:
        start = time.monotonic()
        answer = hands.do(never.wait, 0.2)
        assert time.monotonic() - start < 5.0
        assert "threading.py" in answer.hung
        assert "(wait)" in answer.hung
        assert hands.stuck
        assert hands.do(lambda: 8, 5.0).value == 8
        never.set()


class _Together(Check):
    name, question, together = "fake", "Is it?", True

    def judge(self, answers: Any, lab: Lab) -> Finding:
        return Finding(f"judged {sorted(answers)}")


class _Apart(_Together):
    together = False


def test_explain() -> None:
    """Who is lost, who hangs and who failed is told apart; a whole set is judged."""
    lab = lab_of(2, 2)
    good = {rank: Answer(value=1) for rank in range(4)}
    assert explain(_Together(), good, {}, 1.0, lab).verdict == "ok"
    without = {rank: it for rank, it in good.items() if rank != 3}
    lost = explain(_Together(), without, {3: "is stopped (SIGSTOP, or Ctrl-Z)"}, 1.0, lab)
    assert "rank 3 (node1, pid 1003) does not answer: it is stopped" in texts(lost)
    assert "kill -CONT 1003" in lost.faults[0].cure
    assert "judged" not in lost.summary
    assert explain(_Apart(), without, {}, 1.0, lab).summary == "judged [0, 1, 2]"
    hung = explain(_Together(), good | {2: Answer(hung="x.py:1 (f)")}, {}, 3.0, lab)
    assert "rank 2 (node1) has not come back within 3 s from x.py:1 (f)" in texts(hung)
    trouble = {rank: Answer(trouble="no disk", cure="buy one") for rank in range(4)}
    assert texts(explain(_Together(), trouble, {}, 1.0, lab)) == "no disk"
    one = explain(_Apart(), good | {1: trouble[1]}, {}, 1.0, lab)
    assert texts(one) == "rank 1 (node0): no disk"
    assert one.verdict == "failed"


def test_states_of_processes() -> None:
    """Alive, stopped, dead, gone."""
    assert processes.state(os.getpid()) == "runs"
    child = subprocess.Popen(["sleep", "60"])
    try:
        os.kill(child.pid, 19)
        end = time.monotonic() + 10
        while "stopped" not in processes.state(child.pid) and time.monotonic() < end:
            time.sleep(0.01)
        assert "stopped" in processes.state(child.pid)
        child.kill()
        while processes.state(child.pid) != "has died" and time.monotonic() < end:
            time.sleep(0.01)
        assert processes.state(child.pid) == "has died"
    finally:
        child.kill()
        child.wait()
    assert processes.state(child.pid) == "is gone"
