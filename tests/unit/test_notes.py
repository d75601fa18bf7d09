"""The place of a call is the innermost line of the user's, however it comes about."""

from __future__ import annotations

import inspect
import os
import random
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import monotonic_ns
from typing import Any

import torch

from lockstep import notes
from lockstep.notes import Recorder
from lockstep.watchdog.life import _seen
from lockstep.watchdog.reading import Call, read
from lockstep.watchdog.report import RankReport, report
from lockstep.watchdog.verdict import judge

# As if it were a file of torch's: the test's own frames, and no others, are the user's.
LIBRARY: dict[str, Any] = {}
SOURCE = """
def note(recorder, verb): return recorder.enter("0|0-1", verb, (1,), (), 30.0)
def through(count, function, *arguments):
    return through(count - 1, function, *arguments) if count else function(*arguments)
"""
exec(compile(SOURCE, torch.__file__, "exec"), LIBRARY)
through: Callable[..., Any] = LIBRARY["through"]


def _recorder() -> tuple[Recorder, bytearray]:
    memory = bytearray(notes.BYTES)
    return Recorder(memory, 1e8), memory


def _line() -> int:
    return inspect.stack()[1].lineno


def _last(memory: bytearray) -> Call:
    return max(read(memory).open, key=lambda call: call.entered)


def test_place_at_any_depth() -> None:
    """The verbs come by ways of other lengths, from other lines, in any order."""
    recorder, memory = _recorder()
    choose = random.Random(1)
    for _ in range(300):
        verb, depth = choose.choice(["all_reduce", "broadcast"]), choose.randrange(6)
        if choose.random() < 0.5:
            at, line = through(depth, LIBRARY["note"], recorder, verb), _line()
        else:
            at, line = through(depth, LIBRARY["note"], recorder, verb), _line()
        call = _last(memory)
        assert (call.file, call.line) == ("test_notes.py", line)
        recorder.leave(at)


def test_place_within_a_callback() -> None:
    """The user's code is called by a library that the user's code has called."""
    recorder, memory = _recorder()
    lines: list[int] = []

    def inner(ways: Sequence[int]) -> None:
        if len(ways) > 1:
            through(ways[0], inner, ways[1:])
            return
        at, line = through(ways[0], LIBRARY["note"], recorder, "all_reduce"), _line()
        assert _last(memory).line == line
        lines.append(line)
        recorder.leave(at)

    for ways in ([3], [4, 3], [0, 2, 3], [3]):
        through(2, inner, ways)
    assert len(lines) == 4


def test_no_place_without_the_user() -> None:
    """A thread of a library's, such as autograd's, has no line of the user's."""
    recorder, memory = _recorder()
    thread = threading.Thread(target=LIBRARY["note"], args=(recorder, "all_reduce"))
    thread.start()
    thread.join()
    call = _last(memory)
    assert (call.file, call.line) == ("", 0)


def test_calls_are_counted_by_group_and_told_apart_by_signature() -> None:
    """Numbers go up in each group alone; what a call looks like belongs to its verb."""
    recorder, memory = _recorder()
    said = []
    for group, verb, signature, count in (
        ("0|0-1", "all_reduce", (3,), 3),
        ("1|0-1", "all_reduce", (3,), 3),
        ("0|0-1", "broadcast", (3,), 5),
        ("0|0-1", "all_reduce", (4,), 4),
    ):
        recorder.leave(recorder.enter(group, verb, signature, [torch.ones(count)], 30.0))
        at = recorder.enter(group, verb, signature, [torch.ones(count)], 30.0)
        call = _last(memory)
        said.append((call.group.partition("|")[0], call.number, call.verb, call.what))
        recorder.leave(at)
    assert said == [
        ("0", 2, "all_reduce", "float32[3]"),
        ("1", 2, "all_reduce", "float32[3]"),
        ("0", 4, "broadcast", "float32[5]"),
        ("0", 6, "all_reduce", "float32[4]"),
    ]


def test_notes_are_read_as_they_were_written() -> None:
    """Also when the ring has gone round, and while a call lasts."""
    memory = memoryview(bytearray(notes.BYTES))
    recorder = notes.Recorder(memory, 1e8)
    for n in range(200):
        at = recorder.enter("0|0-3", "all_reduce", (n % 3,), (torch.ones(n % 3),), 5.0)
        if n < 199:
            recorder.leave(at)
    found = read(memory)
    assert found.pid == os.getpid()
    assert [c.number for c in found.calls] == list(range(137, 201))
    assert [c.what for c in found.calls[-3:]] == ["float32[2]", "float32[0]", "float32[1]"]
    (still,) = found.open
    assert (still.number, still.verb, still.limit) == (200, "all_reduce", 5.0)
    assert still.file == "test_notes.py"
    said = report(2, "node1", found, "running", "")
    assert said.open[0].members == "0-3"
    assert RankReport.of_json(said.as_json()) == said


def test_a_call_that_is_written_at_this_moment_is_not_begun() -> None:
    """A limit of 0 would be over at once."""
    memory = memoryview(bytearray(notes.BYTES))
    recorder = notes.Recorder(memory, 1e8)
    at = recorder.enter("0|0-3", "all_reduce", 1, (), 5.0)
    assert read(memory).open
    memory[at + 56 : at + 64] = bytes(8)
    assert not read(memory).calls


def test_notes_survive_more_texts_than_there_is_room_for() -> None:
    """What does not fit is unknown, nothing is overwritten."""
    memory = memoryview(bytearray(notes.BYTES))
    recorder = notes.Recorder(memory, 1e8)
    for n in range(5000):
        recorder.leave(recorder.enter(f"group {n}", "all_reduce", (n,), (), 5.0))
    last = read(memory).calls[-1]
    assert (last.number, last.group) == (1, "")


def test_the_newer_of_two_places() -> None:
    """Where it was seen last, or began its last call; the witness says the same."""
    recorder, memory = _recorder()

    def places() -> tuple[int, str]:
        return read(memory).line, _seen(bytes(memory), notes.HEADER, notes.TEXTS)

    recorder.beat(sys._getframe())
    seen = inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]
    assert places() == (seen, f"; last seen in test_notes.py:{seen}")
    recorder.leave(LIBRARY["note"](recorder, "all_reduce"))
    called = inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]
    assert places() == (called, f"; last seen in test_notes.py:{called}")
    try:
        raise ValueError("on purpose")
    except ValueError as error:
        recorder.hold(error.__traceback__)
        raised = error.__traceback__.tb_lineno  # type: ignore[union-attr]
    recorder.leave(LIBRARY["note"](recorder, "all_reduce"))
    recorder.beat(sys._getframe())
    assert (read(memory).line, read(memory).held) == (raised, True)


def test_a_call_that_is_looked_at_lasts_as_long_as_somebody_looks() -> None:
    """A rank that is stopped, or does not let go of the interpreter, does not wait in it."""
    recorder, memory = _recorder()
    at = LIBRARY["note"](recorder, "all_reduce")
    recorder.qualify(at, notes.ASKED_AGAIN)
    entered = _last(memory).entered
    notes.write_word(memory, notes.BEAT, entered + 3 * 10**9)
    said = read(memory)
    assert said.open[0].seen == entered + 3 * 10**9
    assert said.open[0].age(entered + 100 * 10**9) == 3.0
    assert said.timed(steps=False) == said.open
    for life, now in (("running", True), ("stopped", False), ("gone", False)):
        it = report(1, "node0", replace(said, beat=monotonic_ns()), life, "")
        assert bool(it.open) == now
        assert [call.number for call in it.calls] == [1]
    stuck = report(1, "node0", replace(said, beat=monotonic_ns() - 60 * 10**9), "running", "")
    assert (stuck.stuck, stuck.open) == (True, [])
    recorder.qualify(at, notes.FAILED)
    failed = read(memory)
    assert [call.number for call in failed.open] == [1]  # of which a verdict tells
    assert failed.timed(steps=False) == []  # but nobody waits in it
    recorder.qualify(at, notes.NOT_ISSUED)
    assert read(memory).calls == []
    recorder.leave(at)
    assert not read(memory).open


def test_a_training_step_counts_if_nothing_in_it_is_noted() -> None:
    """And only if it is asked for."""
    recorder, memory = _recorder()
    recorder.enter(notes.TRAINING, "step", 0, (), 5.0)
    assert read(memory).timed(steps=False) == []
    assert [call.verb for call in read(memory).timed(steps=True)] == ["step"]
    at = LIBRARY["note"](recorder, "all_reduce")
    assert [call.verb for call in read(memory).timed(steps=True)] == ["all_reduce"]
    recorder.leave(at)
    assert [call.verb for call in read(memory).timed(steps=True)] == ["step"]


def test_verbs_have_names_when_shapes_have_no_room_any_more() -> None:
    """Of one rank all shapes are known, of another none: that is no difference."""
    recorder, memory = _recorder()
    for n in range(5000):
        recorder.leave(recorder.enter("0|0-1", "all_to_all", (n,), (torch.ones(n),), 5.0))
    recorder.leave(recorder.enter("0|0-1", "all_reduce", 1, (torch.ones(7),), 5.0))
    last = read(memory).calls[-1]
    assert (last.verb, last.what, last.group) == ("all_reduce", notes.UNKNOWN, "0|0-1")
    there = report(1, "node0", read(memory), "running", "")
    here = replace(there, rank=0, done=[replace(c, what="float32[7]") for c in there.done])
    assert not judge([here, there]).blamed
    other = replace(here, done=[*here.done[:-1], replace(here.done[-1], verb="broadcast")])
    assert judge([other, there, replace(there, rank=2)]).blamed == {0}


def test_whose_a_file_is() -> None:
    """Libraries are not the user's, wherever they are installed."""
    assert notes.is_the_users(__file__)
    assert notes.is_the_users("/home/ann/site-packages.py")
    for name in (
        "<frozen runpy>",
        torch.__file__,
        inspect.getfile(inspect),
        inspect.getfile(notes),
        "/opt/other/lib/python3.11/site-packages/typing_extensions.py",
        "/usr/lib/python3/dist-packages/numpy/core/_methods.py",
    ):
        assert not notes.is_the_users(name), name
