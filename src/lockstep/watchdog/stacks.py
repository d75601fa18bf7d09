"""The Python stacks of a rank, also of one whose main thread does not let go of the interpreter.

They are written to a file in memory that the other ranks of the node can read: by the rank's own
watcher if it gets the interpreter, and else by faulthandler, in C, because of a signal. The frames
of a thread that runs are not to be walked by another one without the interpreter, which crashes; so
that signal is for ranks that are stuck. Another one shows the thread that handles it alone, which
is the main one.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

from lockstep.notes import is_the_users
from lockstep.waiting import Patience, wait_until

# Real-time signals, which nobody sends by chance: for the stacks of all threads, and of one.
_ALL, _ONE = signal.SIGRTMIN + 7, signal.SIGRTMIN + 8
# A signal handler runs in microseconds, on a loaded machine in milliseconds; a watcher looks up a
# few times a second.
_LIMIT, _POLITE = 0.5, 0.8
_PATIENCE = Patience(spins=1, eager=0.0, share=0.2, longest=0.02)
# Seconds without a further line after which an answer is whole.
_SETTLED = 0.03
# The end of the outermost frame of a program; its main thread comes last.
_OUTERMOST = b" in <module>\n"

# Process id and descriptor, which is what `offer` returned there, by a number of the caller's.
Offers = Mapping[int, tuple[int, int]]
# What faulthandler writes first and last at a crash.
_CRASH, _MODULES = "Fatal Python error: ", "\nExtension modules: "
_file = -1


def offer() -> int:
    """Let the ranks of the node ask for the stacks of this process, to its end. Local.

    Returns:
        the descriptor that they are written to.
    """
    global _file
    if _file < 0:
        _file = os.memfd_create("lockstep: stacks", os.MFD_CLOEXEC)
    faulthandler.register(_ALL, file=_file, all_threads=True, chain=False)
    faulthandler.register(_ONE, file=_file, all_threads=False, chain=False)
    if not faulthandler.is_enabled():
        faulthandler.enable(file=_file, all_threads=True)
    return _file


def keep(pid: int, descriptor: int) -> IO[bytes] | None:
    """Keep the file that a process offers, to read it when the process is gone. Local."""
    try:
        return open(f"/proc/{pid}/fd/{descriptor}", "rb")
    except OSError:
        return None


def of_crash(file: IO[bytes] | None) -> str:
    """Return the stacks with which a process has crashed, "" if it has not. Local."""
    if file is None:
        return ""
    file.seek(0)
    text = file.read().decode(errors="replace").rpartition(_CRASH)
    return f"{_CRASH}{text[2].partition(_MODULES)[0].rstrip()}" if text[1] else ""


def show() -> None:
    """Write the stacks of this process to what it offers. Local."""
    faulthandler.dump_traceback(file=_file, all_threads=True)


def own() -> str:
    """Return the stacks of this process. Local."""
    begin = os.fstat(_file).st_size
    show()
    return os.pread(_file, os.fstat(_file).st_size - begin, begin).decode(errors="replace")


def fetch(offers: Offers, tell: Callable[[int], None]) -> dict[int, str]:
    """Return the stacks of all threads of processes, "" of one that does not answer. Local.

    Args:
        offers: whom to ask; one that is stopped does not answer.
        tell: lets a process know that it is to show them; who does not is stuck.
    """
    questions = {number: _Question(*offer) for number, offer in offers.items()}
    for number in questions:
        tell(number)
    wait_until(lambda: all(it.settled for it in questions.values()), _POLITE, _PATIENCE)
    stuck = [it for it in questions.values() if not it.begun and it.send(_ALL)]
    wait_until(lambda: all(it.settled for it in stuck), _LIMIT, _PATIENCE)
    return {number: it.answer() for number, it in questions.items()}


def places(offers: Offers) -> dict[int, str]:
    """Return where in the user's code the main threads of processes are, "" if unknown. Local.

    All are asked at once: to ask many one after the other would take seconds.

    Args:
        offers: whom to ask; not this process.
    """
    questions = {number: _Question(*offer) for number, offer in offers.items()}
    asked = [it for it in questions.values() if it.send(_ONE)]
    wait_until(lambda: all(it.shows_main for it in asked), _LIMIT, _PATIENCE)
    return {number: place(it.answer()) for number, it in questions.items()}


class _Question:
    """A question for the stacks of a process, and the answer."""

    def __init__(self, pid: int, descriptor: int) -> None:
        self._pid, self._file = pid, keep(pid, descriptor)
        self._begin = 0
        with contextlib.suppress(OSError):
            self._begin = self._file.seek(0, os.SEEK_END) if self._file else 0
        self._size, self._changed = self._begin, time.monotonic()

    def send(self, number: int) -> bool:
        """Send a signal, unless the process does not handle it: then it would be ended by it."""
        try:
            if self._file is None or not _catches(self._pid, number):
                return False
            os.kill(self._pid, number)
        except OSError:
            return False
        return True

    @property
    def begun(self) -> bool:
        """Whether something of an answer is there."""
        if self._file is not None:
            now = os.fstat(self._file.fileno()).st_size
            if now != self._size:
                self._size, self._changed = now, time.monotonic()
        return self._size > self._begin

    @property
    def settled(self) -> bool:
        """Whether the answer is there and grows no longer, or will never come."""
        return self._file is None or (self.begun and time.monotonic() - self._changed > _SETTLED)

    @property
    def shows_main(self) -> bool:
        """Whether the answer has come as far as the outermost frame, or all there will be."""
        if self._file is None or not self.begun:
            return self._file is None
        last = os.pread(self._file.fileno(), len(_OUTERMOST), self._size - len(_OUTERMOST))
        return last == _OUTERMOST or self.settled

    def answer(self) -> str:
        """Return what has come, and let go of the process."""
        if self._file is None:
            return ""
        with self._file as file, contextlib.suppress(OSError):
            file.seek(self._begin)
            return file.read().decode(errors="replace")
        return ""


def _catches(pid: int, number: int) -> bool:
    """Say whether a process handles a signal."""
    with open(f"/proc/{pid}/status") as file:
        caught = next(line for line in file if line.startswith("SigCgt:")).split()[1]
    return bool(int(caught, 16) >> (number - 1) & 1)


def place(text: str) -> str:
    """Return the innermost file and line of the user's on the main thread's stack. Local."""
    main = text.strip().split("\n\n")[-1]
    for name, line in re.findall(r'File "(.*)", line (\d+)', main):
        if is_the_users(name):
            return f"{Path(name).name}:{line}"
    return ""
