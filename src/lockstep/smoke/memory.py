"""Check the memory: is there room for what training needs, and do the limits allow it?"""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from lockstep.errors import counted
from lockstep.smoke.check import Check, Finding, Lab
from lockstep.smoke.compare import by_node, named

_MIB = 2**20
# What a rank needs: torch itself, a data set, a model and its gradients.
_RANK, _LEAST_RANK = 1024 * _MIB, 256 * _MIB
# /dev/shm: where most MPIs and data loaders keep what ranks share.
_SHM, _LEAST_SHM = 64 * _MIB, 16 * _MIB
# Open files: libraries and code, and connections to every other rank, by MPI and by gloo.
_FILES, _FILES_A_RANK, _GOOD_FILES = 128, 4, 1024
_UNLIMITED = resource.RLIM_INFINITY


@dataclass(frozen=True)
class Facts:
    """Bytes that are there, and limits of this process; None where there is no limit."""

    available: int
    shm: int
    files: int | None
    address_space: int | None
    locked: int | None
    infiniband: bool


class Memory(Check):
    """Whether memory, /dev/shm and the limits of a process suffice."""

    name = "memory"
    question = "Is there room in memory and /dev/shm, and do the limits allow what is needed?"
    limit = 8.0

    def measure(self, lab: Lab) -> Facts:
        """Return what this rank may use."""
        shm = os.statvfs("/dev/shm")
        return Facts(
            available=available(),
            shm=shm.f_bavail * shm.f_frsize,
            files=_limit(resource.RLIMIT_NOFILE),
            address_space=_limit(resource.RLIMIT_AS),
            locked=_limit(resource.RLIMIT_MEMLOCK),
            infiniband=any(Path("/sys/class/infiniband").glob("*")),
        )

    def judge(self, answers: Mapping[int, Facts], lab: Lab) -> Finding:
        """Compare with what the ranks of a node need together."""
        least = min(it.available for it in answers.values())
        shm = min(it.shm for it in answers.values())
        files = min(_or_much(it.files) for it in answers.values())
        shown = "unlimited" if files == _or_much(None) else files
        found = Finding(
            f"least on any node: memory {_size(least)}, /dev/shm {_size(shm)}; open files {shown}"
        )
        for ranks in by_node(lab.roster).values():
            here = [rank for rank in ranks if rank in answers]
            if here:
                _room(found, answers[here[0]], len(here), lab.roster[here[0]].host)
        _limits(found, answers, lab)
        found.details = {str(rank): asdict(it) for rank, it in answers.items()}
        return found


def available(proc: Path = Path("/proc"), group: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that can be had without swapping, in the job's control group too. Local."""
    lines = (proc / "meminfo").read_text().splitlines()
    values = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if ":" in line}
    free = values.get("MemAvailable", values.get("MemFree", 0))
    try:
        most = int((group / "memory.max").read_text())
        free = min(free, most - int((group / "memory.current").read_text()))
    except (OSError, ValueError):  # no control group, or no limit: "max"
        pass
    return free


def _room(found: Finding, it: Facts, ranks: int, host: str) -> None:
    wanted = counted(ranks, "rank")
    if it.available < _RANK * ranks:
        report = found.fail if it.available < _LEAST_RANK * ranks else found.warn
        report(
            f"{host}: {_size(it.available)} of memory for {wanted}, {_size(_RANK * ranks)} needed",
            f"ssh {host} free -m; sbatch --mem=…; or fewer ranks there",
        )
    if it.shm < _SHM * ranks:
        report = found.fail if it.shm < _LEAST_SHM * ranks else found.warn
        report(
            f"{host}: {_size(it.shm)} free in /dev/shm for {wanted}, {_size(_SHM * ranks)} needed",
            f"ssh {host} ls -l /dev/shm   # what crashed jobs left; docker --shm-size=1g; "
            "mount -o remount,size=50% /dev/shm",
        )


def _limits(found: Finding, answers: Mapping[int, Facts], lab: Lab) -> None:
    need = _FILES + _FILES_A_RANK * lab.world.size
    few = [rank for rank, it in answers.items() if _or_much(it.files) < max(need, _GOOD_FILES)]
    if few:
        least = min(_or_much(answers[rank].files) for rank in few)
        report = found.fail if least < need else found.warn
        report(
            f"{named(few, lab.roster)}: {least} open files allowed, "
            f"{max(need, _GOOD_FILES)} needed",
            "ulimit -n 4096 before mpirun; for all hosts in /etc/security/limits.conf: "
            "* soft nofile 4096",
        )
    small = [rank for rank, it in answers.items() if _or_much(it.address_space) < 64 * 2**30]
    if small:
        found.warn(
            f"{named(small, lab.roster)}: the address space is limited to "
            f"{_size(_or_much(answers[small[0]].address_space))}; torch reserves more than it uses",
            "ulimit -v unlimited",
        )
    pinned = [
        rank
        for rank, it in answers.items()
        if it.infiniband and _or_much(it.locked) < 64 * _MIB * lab.world.local_size
    ]
    if pinned:
        found.warn(
            f"{named(pinned, lab.roster)}: memory that may be locked is limited to "
            f"{_size(_or_much(answers[pinned[0]].locked))}, and InfiniBand needs it",
            "ulimit -l unlimited; * - memlock unlimited in /etc/security/limits.conf",
        )


def _limit(what: int) -> int | None:
    soft = resource.getrlimit(what)[0]
    return None if soft == _UNLIMITED else soft


def _or_much(limit: int | None) -> int:
    return 2**62 if limit is None else limit


def _size(number: int) -> str:
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / _MIB:.0f} MiB"
