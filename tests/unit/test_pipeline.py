"""Stages of work in threads of their own."""

from __future__ import annotations

import signal
import threading

import pytest

from lockstep.pipeline import Line


class _Alarm(Exception):
    pass


def test_work_in_order() -> None:
    """Each piece goes through all stages, in the order in which it was put in."""
    seen: list[tuple[str, int]] = []
    stages = [lambda piece: seen.append(("a", piece)), lambda piece: seen.append(("b", piece))]
    for overlap in (False, True):
        line = Line(stages, overlap=overlap)
        for piece in range(20):
            line.put(piece)
        line.finish()
        line.close()
        for stage in "ab":
            assert [piece for name, piece in seen if name == stage] == list(range(20))
        seen.clear()


def test_an_error_comes_out_once() -> None:
    """The first one; the line takes more work afterwards."""

    def divide(piece: int) -> None:
        assert 1 // piece

    line = Line([divide], overlap=True)
    line.put(0)
    line.put(1)
    with pytest.raises(ZeroDivisionError):
        line.finish()
    line.finish()
    line.close()


def test_what_still_runs_is_waited_for_after_a_signal() -> None:
    """An exception of a signal handler leaves the wait, not the work."""
    go, done = threading.Event(), []

    def work(piece: int) -> None:
        assert go.wait(60.0)
        done.append(piece)

    def raise_alarm(*_: object) -> None:
        raise _Alarm

    line = Line([work], overlap=True)
    line.put(1)
    line.put(2)
    previous = signal.signal(signal.SIGALRM, raise_alarm)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(_Alarm):
            line.finish()
    finally:
        signal.signal(signal.SIGALRM, previous)
    threading.Timer(0.1, go.set).start()
    line.finish()
    assert done == [1, 2]
    line.close()
