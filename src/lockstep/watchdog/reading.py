"""Read what a rank of this node has noted."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from lockstep.notes import (
    ASKED_AGAIN,
    CALL,
    CALLS,
    FAILED,
    HEADER,
    NOT_ISSUED,
    ROOM,
    TEXTS,
    TRAINING,
)

_read_words = struct.Struct("11q").unpack_from
_read_call = struct.Struct("7qd").unpack_from


@dataclass(frozen=True)
class Call:
    """A call that a rank has begun.

    Attributes:
        group: name of the process group.
        number: of the call on that group, from 1.
        verb, what: all_reduce, and float32[21840].
        file, line: of the user's code.
        entered, left: nanoseconds of time.monotonic_ns; left is 0 while it lasts.
        limit: seconds.
        seen: of a call that does not say when it is over, when it lasted; otherwise 0.
        failed: nobody waits in it any more, but nothing has come after it.
    """

    group: str
    number: int
    verb: str
    what: str
    file: str
    line: int
    entered: int
    left: int
    limit: float
    seen: int = 0
    failed: bool = False

    def age(self, now: int) -> float:
        """Return for how many seconds it lasts, as far as is known."""
        return max(0, (self.seen or now) - self.entered) / 1e9


@dataclass(frozen=True)
class Notes:
    """What a rank's part of the memory says.

    Attributes:
        pid: process id.
        state: RUNNING and so on.
        code: exit code, if it left by one.
        beat: nanoseconds of time.monotonic_ns when its thread last had the interpreter.
        file, line: where in the user's code it was then, or when it began its last call.
        held: that is where an error was raised, and stays so.
        asked: nanoseconds of time.monotonic_ns when it asked for a verdict, 0 if it did not.
        stacks: the file descriptor that its stacks are written to.
        calls: the last ones, oldest first.
    """

    pid: int
    state: int
    code: int
    beat: int
    file: str
    line: int
    held: bool
    asked: int
    stacks: int
    calls: list[Call]

    @property
    def open(self) -> list[Call]:
        """The calls that are not over, oldest first."""
        return [call for call in self.calls if not call.left]

    def timed(self, *, steps: bool) -> list[Call]:
        """Return the calls that are not over and should be some time.

        Args:
            steps: a training step too, if nothing in it is noted. By itself it may take as long as
                it likes; but of calls that are not noted, and are to wait, nothing else is known.
        """
        found = [call for call in self.open if not call.failed]
        return [c for c in found if c.group != TRAINING or (steps and len(found) == 1)]


def read(memory: Any) -> Notes:
    """Return what a rank has noted. Local.

    Args:
        memory: that rank's part.
    """
    pid, state, beat, file, line, asked, _, stacks, code, _, held = _read_words(memory, 0)
    calls = []
    for n in range(CALLS):
        words = _read_call(memory, HEADER + n * CALL)
        number, group, what, where, at, entered, left, limit = words
        # The limit is written last: a rank may be interrupted in the middle for a long time.
        if entered and limit and left != NOT_ISSUED:
            verb, _, tensors = _read_text(memory, what).partition("\0")
            names = _read_text(memory, group), number, verb, tensors, _read_text(memory, where)
            seen = beat if left in (ASKED_AGAIN, FAILED) else 0
            calls.append(Call(*names, at, entered, max(left, 0), limit, seen, left == FAILED))
    calls.sort(key=lambda call: call.entered)
    place = _read_text(memory, file)
    if not held and (last := next((c for c in reversed(calls) if c.file), None)):
        place, line = (last.file, last.line) if last.entered > beat else (place, line)
    return Notes(pid, state, code, beat, place, line, bool(held), asked, stacks, calls)


def _read_text(memory: Any, at: int) -> str:
    if not 0 < at < ROOM:
        return ""
    start = TEXTS + at
    return bytes(memory[start + 1 : start + 1 + memory[start]]).decode(errors="replace")
