"""Which processes of this host, other than ranks of this job, take much of a core. Local; Linux."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# A share of a core from which on a process is in the way.
_MUCH = 0.1


@dataclass(frozen=True)
class Busy:
    """A process that takes much of a core."""

    pid: int
    name: str
    share: float

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid}, {self.share:.0%} of a core)"


def busiest(most: int = 3) -> Callable[[], list[Busy]]:
    """Begin to watch; what is returned ends it and returns the busiest processes. Local.

    Processes that have this one's parent are left out: they are ranks of this job.
    """
    before, start = _times(), time.monotonic()

    def end() -> list[Busy]:
        seconds = max(time.monotonic() - start, 0.05)
        tick = os.sysconf("SC_CLK_TCK")
        found = [
            Busy(pid, name, (ticks - before[pid][1]) / tick / seconds)
            for pid, (name, ticks) in _times().items()
            if pid in before
        ]
        found = [one for one in found if one.share > _MUCH]
        return sorted(found, key=lambda one: -one.share)[:most]

    return end


def _times() -> dict[int, tuple[str, int]]:
    """Return name and CPU time, in ticks, of all processes that are no siblings of this one."""
    times: dict[int, tuple[str, int]] = {}
    parent = os.getppid()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            text = (entry / "stat").read_text()
        except OSError:
            continue
        name = text.partition("(")[2].rpartition(")")[0]
        values = text.rpartition(")")[2].split()
        # proc(5): after the name come state, ppid, …; utime and stime are fields 14 and 15
        if int(values[1]) != parent:
            times[int(entry.name)] = name, int(values[11]) + int(values[12])
    return times
