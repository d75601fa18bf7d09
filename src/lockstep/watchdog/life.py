"""Is a process of this node alive, stopped or gone, and how did it end?"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct

# ioctl of a pidfd, Linux 6.15 and later: struct pidfd_info of 64 bytes, whose last word is the exit
# status; bit 3 of the mask asks for it. linux/pidfd.h
_GET_INFO = 0xC040FF0B
_EXIT = 1 << 3


class Life:
    """Watches a process that need not be a child. Local.

    Args:
        pid: it must be alive.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._handle = -1
        with contextlib.suppress(OSError):
            self._handle = os.pidfd_open(pid)

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when the process ends, or -1."""
        return self._handle

    @property
    def gone(self) -> bool:
        """Whether the process has ended."""
        if self._handle < 0:
            return state(self.pid) in ("", "Z", "X")
        poll = select.poll()
        poll.register(self._handle, select.POLLIN)
        return bool(poll.poll(0))

    @property
    def stopped(self) -> bool:
        """Whether a signal has stopped the process, or a debugger holds it."""
        return state(self.pid) in ("T", "t")

    def how(self) -> str:
        """Say how it ended: "SIGKILL, signal 9", "exit code 3"; "" if that is not known."""
        status = self._status()
        if status is None:
            return ""
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            with contextlib.suppress(ValueError):
                return f"{signal.Signals(number).name}, signal {number}"
            return f"signal {number}"
        return f"exit code {os.WEXITSTATUS(status)}"

    def close(self) -> None:
        """Stop watching."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _status(self) -> int | None:
        info = bytearray(64)
        struct.pack_into("Q", info, 0, _EXIT)
        try:
            fcntl.ioctl(self._handle, _GET_INFO, info)
        except (OSError, ValueError):
            return _status_of_zombie(self.pid)
        if not struct.unpack_from("Q", info, 0)[0] & _EXIT:
            return _status_of_zombie(self.pid)
        status: int = struct.unpack_from("i", info, 60)[0]
        return status


def state(pid: int) -> str:
    """Return the state letter of a process, R, S, D, T, Z …; "" if there is none. Local."""
    fields = _fields(pid)
    return fields[0] if fields else ""


def _status_of_zombie(pid: int) -> int | None:
    fields = _fields(pid)
    return int(fields[-1]) if fields and fields[0] == "Z" else None


def _fields(pid: int) -> list[str]:
    """Return what /proc says after the name, which may hold anything."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []
