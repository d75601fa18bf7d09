"""How much memory is free, for what all processes of a node share. All Local.

What Lockstep shares lies in anonymous files, which neither the size of /dev/shm nor a limit of a
process holds down: only the memory of the machine does, and that of the control group, which is
what a batch system gives a job.
"""

from __future__ import annotations

import re
from pathlib import Path

_ROOT = Path("/")


def free_memory(root: Path = _ROOT) -> int:
    """Return the bytes that can still be taken before the machine or the job runs out of memory.

    Args:
        root: where /proc and /sys are.
    """
    text = (root / "proc/meminfo").read_text()
    found = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    return min([int(found[1]) << 10 if found else 0, *_left_in_groups(root)])


def _left_in_groups(root: Path) -> list[int]:
    """Return the bytes left in each control group that this process is in."""
    found = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if not kinds:  # version 2
            top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in kinds.split(","):
            top = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        inside = top / path.lstrip("/")
        for group in (inside, *inside.parents):
            if (left := _left(group, *names)) is not None:
                found.append(left)
            if group == top:
                break
    return found


def _left(group: Path, limit: str, used: str) -> int | None:
    try:
        most, now = (group / limit).read_text().strip(), int((group / used).read_text())
        stat = (group / "memory.stat").read_text()
    except (OSError, ValueError):
        return None
    if not most.isdecimal():
        return None  # "max": no limit
    # Pages of files that were read lately count as used, but are given up for others.
    # Version 1 lists those of the group alone first, then those of all groups below it too.
    cache = re.findall(r"^(?:total_)?inactive_file (\d+)$", stat, re.MULTILINE)
    return max(0, int(most) - now + int((cache or ["0"])[-1]))
