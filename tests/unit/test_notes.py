"""The place of a call is the innermost line of the user's, however it comes about."""

from __future__ import annotations

import inspect
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lockstep import notes
from lockstep.notes import Recorder
from lockstep.watchdog.reading import Call, read

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
