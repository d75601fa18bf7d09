"""What each rank is doing, in memory that the other ranks of its node can read.

A rank's part of the memory begins with a header of words of 64 bits, then come the last 64 calls as
a ring, then texts. Only the rank itself writes its part, and it never waits: a reader that comes in
the middle of a write sees a call that is not begun yet, or begun twice, for some nanoseconds.
"""

from __future__ import annotations

import os
import struct
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from time import monotonic_ns
from types import FrameType, TracebackType
from typing import Any

import torch

# Words of the header.
PID, STATE, BEAT, FILE, LINE, ASKED, TOLD, STACKS, CODE, ENDED, HELD, SHOW = range(12)
# Values of STATE: in the session; it ended as it should; it was left by an exception, or an exit;
# or by an error that says what other ranks did or did not.
RUNNING, CLOSED, RAISED, EXITED, GAVE_UP = range(5)
# When a call was left, if that has to be asked for; if it has failed; if it is not issued yet.
ASKED_AGAIN, FAILED, NOT_ISSUED = -1, -2, -3

HEADER, CALLS, CALL = 128, 64, 64
TEXTS = HEADER + CALLS * CALL
ROOM, SPARE = 32 * 2**10, 8 * 2**10
UNKNOWN = "…"
BYTES = TEXTS + ROOM
_MASK = CALLS - 1
# Whether to compare what costs time to compare, at every call.
CHECK = os.environ.get("LOCKSTEP_CHECK", "0") != "0"
# Pseudo-groups: of point-to-point messages that are waited for, of training steps, of the sums of
# the hand-written SGD. The last two have no limit of their own.
MESSAGES, TRAINING, SUMS = "messages", "training", "sgd"
_write_call = struct.Struct("7qd").pack_into
_write_word, _read_word = struct.Struct("q").pack_into, struct.Struct("q").unpack_from
_frame = sys._getframe

# Code that is not the user's: frames of it are passed over.
_NOT_THE_USERS = tuple(
    f"{Path(path).resolve()}{os.sep}"
    for path in (
        str(Path(__file__).parent),
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
        str(Path(torch.__file__).parent),
    )
)


class _Kinds:
    """What calls of a verb look like: texts by signature; how many frames of ours lie below."""

    def __init__(self) -> None:
        self.texts: dict[object, int] = {}
        self.depth = 1


class Recorder:
    """Writes this rank's part. All methods are Local and wait for nobody.

    Args:
        memory: this rank's part, BYTES long, cleared.
        longest: limit in seconds of calls that have a longer one, or none.
    """

    def __init__(self, memory: Any, longest: float) -> None:
        self._memory, self._longest = memory, longest
        self._numbers = count()
        self._used = 1  # text 0 is the empty one
        self._texts: dict[str, int] = {"": 0}
        self._files: dict[str, int] = {}
        self._kinds: dict[str, _Kinds] = {}
        self._groups: dict[str, list[int]] = {}
        self.set(PID, os.getpid())
        self.set(BEAT, monotonic_ns())

    def enter(
        self, group: str, verb: str, signature: object, tensors: Sequence[Any], seconds: float
    ) -> int:
        """Note that a call begins, and return what `leave` takes.

        Args:
            group, verb: names of the process group and of the call.
            signature: hashable; the same for calls that look the same.
            tensors: described once a signature: dtype and number of elements.
            seconds: limit.
        """
        # A dictionary a verb: to look up both at once, a tuple would have to be made and hashed.
        kinds = self._kinds.get(verb)
        if kinds is None:
            kinds = self._kinds[verb] = _Kinds()
        what = kinds.texts.get(signature)
        if what is None:
            what = self._describe(kinds, verb, signature, tensors)
        counter = self._groups.get(group)
        if counter is None:
            counter = self._groups[group] = [self._text(group), 0]
        counter[1] = number = counter[1] + 1
        # The user's code is most often as far up as the last time; a walk makes an object of each
        # frame on the way. (If it has called itself through a library, it may be an outer line.)
        try:
            below = _frame(kinds.depth)
            above = below.f_back
            file = self._files[above.f_code.co_filename]  # type: ignore[union-attr]
            line = above.f_lineno or 0  # type: ignore[union-attr]
            if not file or self._files[below.f_code.co_filename]:
                file, line = self._find(kinds)
        except (ValueError, AttributeError, KeyError):
            file, line = self._find(kinds)
        at = HEADER + (next(self._numbers) & _MASK) * CALL
        limit = seconds if seconds < self._longest else self._longest
        _write_call(
            self._memory, at, number, counter[0], what, file, line, monotonic_ns(), 0, limit
        )
        return at

    def leave(self, at: int) -> None:
        """Note that a call is over."""
        _write_word(self._memory, at + 48, monotonic_ns())

    def qualify(self, at: int, how: int) -> None:
        """Note of a call that it lasts when this rank last looked, has failed, or is not issued."""
        _write_word(self._memory, at + 48, how)

    def set(self, word: int, value: int) -> None:
        """Write a word of the header."""
        write_word(self._memory, word, value)

    def get(self, word: int) -> int:
        """Read a word of the header."""
        return read_word(self._memory, word)

    def beat(self, frame: FrameType | None, moment: int = 0) -> None:
        """Note that the interpreter is free, or was at a moment, and where a frame is."""
        if not self.get(HELD):
            file, line = self.place(frame)
            self.set(FILE, file)
            self.set(LINE, line)
        self.set(BEAT, moment or monotonic_ns())

    def hold(self, trace: TracebackType | None) -> None:
        """Note where in the user's code an error was raised, and that this rank stays there."""
        while trace is not None:
            name = trace.tb_frame.f_code.co_filename
            if is_the_users(name):
                self.set(FILE, self._text(Path(name).name))
                self.set(LINE, trace.tb_lineno)
                self.set(HELD, 1)
            trace = trace.tb_next

    def place(self, frame: FrameType | None) -> tuple[int, int]:
        """Return the innermost file of the user's, as a text, and its line; zeros if none."""
        return self._walk(frame)[:2]

    def _find(self, kinds: _Kinds) -> tuple[int, int]:
        """Return the innermost file of the user's and its line, and keep how far up it is."""
        file, line, up = self._walk(_frame(1))
        if file:
            kinds.depth = up - 1
        return file, line

    def _walk(self, frame: FrameType | None) -> tuple[int, int, int]:
        """Return the innermost file of the user's, its line, and how far up from a frame it is."""
        up = 0
        while frame is not None:
            if (file := self._file(frame.f_code.co_filename)) != 0:
                return file, frame.f_lineno or 0, up
            frame, up = frame.f_back, up + 1
        return 0, 0, up

    def _file(self, name: str) -> int:
        file = self._files.get(name)
        if file is None:
            file = self._text(Path(name).name) if is_the_users(name) else 0
            self._files[name] = file
        return file

    def _describe(self, kinds: _Kinds, verb: str, signature: object, tensors: Sequence[Any]) -> int:
        shown = [
            f"{str(t.dtype).removeprefix('torch.')}[{t.numel()}]"
            for t in tensors[:3]
            if isinstance(t, torch.Tensor)
        ]
        more = [f"… {len(tensors)} tensors"] if len(tensors) > 3 else []
        # What a verb is called has room when all shapes have none any more.
        what = self._text(f"{verb}\0{', '.join(shown + more)}", SPARE)
        what = what or self._text(f"{verb}\0{UNKNOWN}")
        if len(kinds.texts) < 10_000:
            kinds.texts[signature] = what
        return what

    def _text(self, text: str, spare: int = 0) -> int:
        if (known := self._texts.get(text)) is not None:
            return known
        coded = text.encode()[:200]
        if self._used + len(coded) + 1 > ROOM - spare:
            return 0
        start = TEXTS + self._used
        self._memory[start : start + len(coded) + 1] = bytes([len(coded)]) + coded
        self._texts[text] = used = self._used
        self._used += len(coded) + 1
        return used


def read_word(memory: Any, word: int) -> int:
    """Read a word of the header of a rank's part. Local."""
    value: int = _read_word(memory, word * 8)[0]
    return value


def write_word(memory: Any, word: int, value: int) -> None:
    """Write a word of the header of a rank's part. Local."""
    _write_word(memory, word * 8, value)


def is_the_users(name: str) -> bool:
    """Say whether a file holds the user's code, and not that of a library. Local."""
    if name.startswith("<") or name.startswith(_NOT_THE_USERS):
        return False
    # Also those of another environment that this one looks into.
    return not any(f"{os.sep}{it}{os.sep}" in name for it in ("site-packages", "dist-packages"))


# The recorder of this process, while a session that is watched is open.
current: Recorder | None = None
# Where the stacks of late ranks go: the run directory, once there is one.
directory = ""
# Has the verdict printed; set by the watchdog.
ask: Callable[[float], None] | None = None


@contextmanager
def during(group: str, verb: str, seconds: float = 0.0) -> Iterator[None]:
    """Note the body of a ``with``, or a function, as a call. Local.

    Args:
        group, verb: what it is called in a verdict.
        seconds: its limit; 0 for the session's.
    """
    recorder = current
    if recorder is None:
        yield
        return
    at = recorder.enter(group, verb, 0, (), seconds or session_limit)
    try:
        yield
    finally:
        recorder.leave(at)


def explain(seconds: float = 6.0) -> None:
    """Have a verdict printed on what all ranks are doing, since a call failed by its limit. Local.

    Args:
        seconds: how long to wait for it.
    """
    # Of a call after the session the watch, which goes on for ranks that are late, knows nothing.
    if ask is not None and current is not None:
        ask(seconds)


def step() -> None:
    """Note that a training step is over and the next begins; its limit is the session's. Local."""
    global _step
    recorder = current
    if recorder is None:
        return
    if _step >= 0:
        recorder.leave(_step)
    _step = recorder.enter(TRAINING, "step", 0, (), session_limit)


def no_step() -> None:
    """Note that what follows is no training step. Local."""
    global _step
    if _step >= 0 and current is not None:
        current.leave(_step)
    _step = -1


_step = -1
# Seconds, of the session that is open.
session_limit = 1800.0
