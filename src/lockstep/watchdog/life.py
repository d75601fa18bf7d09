"""Is a process of this node alive, stopped or gone, and how did it end?

Run as a program it is a witness: launchers end all ranks within a millisecond after one has died,
too soon for the others to say a word. It needs nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import select
import signal
import struct
import sys
from collections.abc import Mapping, Sequence

# ioctl of a pidfd, Linux 6.15 and later: struct pidfd_info of 64 bytes, whose last word is the exit
# status; bit 3 of the mask asks for it. linux/pidfd.h
_GET_INFO = 0xC040FF0B
_EXIT = 1 << 3

# What waits for a host that is cut off, after its own ranks are gone.
_LAUNCHERS = ("prterun", "mpirun", "mpiexec", "mpiexec.hydra", "prted", "orted")
# Seconds that a launcher may take to end after its ranks.
_LAST = 15.0


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
        """Whether the process has ended, or is ending: its threads may take a moment longer."""
        return state(self.pid) in ("", "Z", "X") or self._has_ended(0.0)

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

    def ends(self, seconds: float) -> bool:
        """Wait until the process has ended; return False if it takes longer."""
        return self._has_ended(seconds) or self.gone

    def close(self) -> None:
        """Stop watching."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _has_ended(self, seconds: float) -> bool:
        poll = select.poll()
        if self._handle >= 0:
            poll.register(self._handle, select.POLLIN)
        return bool(poll.poll(int(seconds * 1000)))

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


def witness(arguments: Sequence[str]) -> int:
    """Say which rank of a node went first, if it left without a word. Local.

    Args:
        arguments: a descriptor of the notes, bytes of a rank's part, where calls and where texts
            begin in it, the host, the ranks; a part begins with words of 64 bits, the process id,
            the state, which is 0 while it runs, a moment, and where it was then: a text of its
            file, and the line.
    """
    descriptor, each, calls, texts = map(int, arguments[:4])
    host, ranks = arguments[4:6]
    names = ranks.split(",")
    notes = mmap.mmap(descriptor, each * len(names))
    words = [struct.unpack_from("qq", notes, each * n) for n in range(len(names))]
    lives = {rank: Life(pid) for rank, (pid, _) in zip(names, words, strict=True)}
    launcher = _launcher_of(words[0][0])
    rank = _first_to_go(lives)
    # A rank that ends the job itself, or has ended its session, has said so.
    quiet = any(struct.unpack_from("qq", notes, each * n)[1] for n in range(len(names)))
    how = lives[rank].how() if rank else ""
    if rank and not quiet and how != "SIGTERM, signal 15":  # which is how a job is cancelled
        how = how or "killed, or ended without a word"
        part = notes[each * names.index(rank) :][:each]
        place = _seen(part, calls, texts)
        sys.stderr.write(f"lockstep: rank {rank} ({host}) is gone ({how}){place}\n")
    # The launcher waits until nobody can write to the ranks' output any more.
    sys.stderr.flush()
    os.dup2(1, 2)  # standard output is /dev/null
    if launcher is not None and all(it.ends(_LAST) for it in lives.values()):
        _see_off(launcher)
    return 0


def _seen(part: bytes, begin: int, texts: int) -> str:
    """Say where in the user's code a rank was a moment ago."""
    _, _, beat, file, line = struct.unpack_from("5q", part)
    # its last calls: number, three texts, the line, when it was entered and left, the limit
    calls = [struct.unpack_from("6q", part, at) for at in range(begin, texts, 64)]
    _, file, line = max([(beat, file, line), *((c[5], c[3], c[4]) for c in calls if c[3])])
    start = texts + file + 1
    name = part[start : start + part[start - 1]].decode(errors="replace") if file else ""
    return f"; last seen in {name}:{line}" if name else ""


def _first_to_go(lives: Mapping[str, Life]) -> str:
    """Wait until a process has ended; return its rank, "" if none can be waited for."""
    # Not poll: a launcher may have ended the others before this one is awake, and epoll tells who
    # was first.
    ranks = {life.fileno(): rank for rank, life in lives.items() if life.fileno() >= 0}
    with select.epoll() as ends:
        for descriptor in ranks:
            ends.register(descriptor, select.EPOLLIN)
        return ranks[ends.poll()[0][0]] if ranks else ""


def _launcher_of(pid: int) -> Life | None:
    """Return the launcher of a rank, or its daemon on this node; never a batch system's."""
    for _ in range(4):  # itself, or a proxy of it, or a proxy's proxy
        fields = _fields(pid)
        pid = int(fields[1]) if fields else 0
        with contextlib.suppress(OSError), open(f"/proc/{pid}/comm") as file:
            if file.read().strip() in _LAUNCHERS:
                return Life(pid)
    return None


def _see_off(launcher: Life) -> None:
    """End a launcher that goes on when its ranks are gone: it waits for a host that is cut off."""
    if launcher.ends(_LAST):
        return
    with contextlib.suppress(OSError), open(f"/proc/{launcher.pid}/fd/2", "a") as file:
        file.write(
            f"lockstep: {_LAST:g} s after the last rank the launcher (process {launcher.pid}) "
            "still waits, perhaps for a host that is cut off: ending it\n"
        )
    # The first one asks it to be orderly, which it tries already.
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(launcher.pid, number)
        if launcher.ends(3.0):
            return


if __name__ == "__main__":
    sys.exit(witness(sys.argv[1:]))
