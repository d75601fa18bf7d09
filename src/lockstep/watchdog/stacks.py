"""The Python stacks of a rank, also of one whose main thread does not let go of the interpreter.

A signal makes faulthandler, in C, write them to a file in memory that the other ranks of the node
can read.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time
from pathlib import Path
from typing import IO

from lockstep.notes import is_the_users
from lockstep.waiting import Patience, wait_until

# A real-time signal, which nobody sends by chance.
_SIGNAL = signal.SIGRTMIN + 7
# A signal handler runs in microseconds, on a loaded machine in milliseconds.
_LIMIT = 0.5
_PATIENCE = Patience(spins=1, eager=0.0, share=0.2, longest=0.02)

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
    faulthandler.register(_SIGNAL, file=_file, all_threads=True, chain=False)
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


def ask(pid: int, descriptor: int) -> str:
    """Return the stacks of a process that offers them, "" if it does not answer. Local.

    Args:
        pid: of the process; one that is stopped does not answer.
        descriptor: what `offer` returned there.
    """
    try:
        with open(f"/proc/{pid}/fd/{descriptor}", "rb") as file:
            before = file.seek(0, os.SEEK_END)
            if not _catches(pid):
                return ""
            os.kill(pid, _SIGNAL)
            size, changed = before, time.monotonic()

            def settled() -> bool:
                nonlocal size, changed
                now = os.fstat(file.fileno()).st_size
                if now != size:
                    size, changed = now, time.monotonic()
                return size > before and time.monotonic() - changed > 0.03

            wait_until(settled, _LIMIT, _PATIENCE)
            file.seek(before)
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _catches(pid: int) -> bool:
    """Say whether a process handles our signal; one that does not would be ended by it."""
    with open(f"/proc/{pid}/status") as file:
        caught = next(line for line in file if line.startswith("SigCgt:")).split()[1]
    return bool(int(caught, 16) >> (_SIGNAL - 1) & 1)


def place(text: str) -> str:
    """Return the innermost file and line of the user's on the main thread's stack. Local."""
    main = text.strip().split("\n\n")[-1]
    for name, line in re.findall(r'File "(.*)", line (\d+)', main):
        if is_the_users(name):
            return f"{Path(name).name}:{line}"
    return ""
