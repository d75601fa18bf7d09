"""What a run was made with and on: versions, hosts, threads, the commit. Everything is Local."""

from __future__ import annotations

import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

from lockstep.launcher import short_version
from lockstep.world import World


def surroundings(world: World, hosts: list[str]) -> dict[str, Any]:
    """Return what belongs into settings.json besides the settings.

    Args:
        hosts: of the ranks, in their order.
    """
    from mpi4py import MPI

    return {
        "command": sys.argv,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "ranks": world.size,
        "nodes": world.nodes,
        "hosts": hosts,
        "threads_a_rank": torch.get_num_threads(),
        "git": git_id(Path(sys.argv[0]).resolve().parent),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "mpi": short_version(MPI.Get_library_version()),
        },
    }


def git_id(start: Path) -> str | None:
    """Return the commit that is checked out around a directory, None outside of a repository.

    Local. It reads git's files: a process that uses MPI had better not start others.
    """
    top = next((p for p in (start, *start.parents) if (p / ".git").is_dir()), None)
    if top is None:
        return None
    git = top / ".git"
    try:
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        name = head.removeprefix("ref: ")
        if (git / name).exists():
            return (git / name).read_text().strip()
        packed = (git / "packed-refs").read_text().splitlines()
    except OSError:
        return None
    return next((line.split()[0] for line in packed if line.endswith(" " + name)), None)
