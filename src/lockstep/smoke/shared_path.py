"""Check the shared path: do all nodes see one directory, and what may be relied on there?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lockstep.rendezvous.directory import fresh_place
from lockstep.rendezvous.locks import Race
from lockstep.smoke import files
from lockstep.smoke.check import Check, Finding, Lab
from lockstep.smoke.pictures import Matrix

_GIB = 2**30
# Seconds that a new file may need to be seen elsewhere, and bytes a second, before we say so.
_LATE, _SLOW = 1.0, 20e6


@dataclass(frozen=True)
class Facts:
    """What one rank has found in the directory; see `files` for each."""

    seen: tuple[float | None, ...]
    renames: files.Renames
    locks: Race
    space: int
    kind: str
    speed: files.Speed | None


class SharedPath(Check):
    """Whether the directory is one for all nodes, with renames and locks that hold."""

    name = "path"
    question = "Is the shared directory one for all nodes, and do renames and locks hold there?"
    limit = 25.0
    together = True

    def measure(self, lab: Lab) -> Facts:
        """Make a fresh place in the directory, try everything in it, remove it."""
        shared = lab.options.shared.absolute()
        with fresh_place(lab.world, shared) as place:
            lab.to_remove.append(place)
            return Facts(
                seen=files.see_each_other(lab.world, place),
                renames=files.rename_under_readers(lab.world, place),
                locks=files.races(lab.world, place),
                space=files.space(place),
                kind=files.kind_of(place),
                speed=files.speed(lab.world, place),
            )

    def judge(self, answers: Mapping[int, Facts], lab: Lab) -> Finding:
        """Judge by the worst that any rank has seen."""
        shared, first = lab.options.shared.absolute(), answers[0]
        hosts = _hosts(lab)
        delays = [it for one in answers.values() for it in one.seen if it is not None]
        speeds = {
            lab.roster[rank].host: it.speed for rank, it in answers.items() if it.speed is not None
        }
        found = Finding(f"{shared} ({first.kind}): {_size(first.space)} free, {first.locks}")
        _visible(found, answers, lab, hosts)
        _renames(found, answers)
        _locks(found, first.locks, str(shared))
        _space_and_speed(found, answers, speeds)
        found.details = {
            "directory": str(shared),
            "file system": {lab.roster[rank].host: it.kind for rank, it in answers.items()},
            "longest_delay_seconds": max(delays, default=0.0),
            "renames": first.renames.done,
            "locks": str(first.locks),
            "rendezvous": f"file://{shared}" if first.locks.holds else "tcp",
            "free_bytes": first.space,
            "speed": {host: asdict(speed) for host, speed in speeds.items()},
        }
        if len(hosts) > 1:
            found.pictures = [_delays(answers, lab, hosts)]
        return found


def _hosts(lab: Lab) -> list[str]:
    leaders = sorted((it.node, it.host) for it in lab.roster.values() if it.local_rank == 0)
    return [host for _, host in leaders]


def _visible(found: Finding, answers: Mapping[int, Facts], lab: Lab, hosts: list[str]) -> None:
    for rank, it in answers.items():
        for node, delay in enumerate(it.seen):
            here = lab.roster[rank].host
            if delay is None:
                found.fail(
                    f"what {hosts[node]} writes is not seen by {lab.roster[rank]}",
                    f"on both hosts: df {lab.options.shared.absolute()}",
                )
            elif delay > _LATE:
                found.warn(
                    f"{here} sees a new file of {hosts[node]} only after {delay:.1f} s",
                    "mount it with a shorter attribute cache: -o actimeo=1 or lookupcache=positive",
                )


def _renames(found: Finding, answers: Mapping[int, Facts]) -> None:
    missing = sum(it.renames.missing for it in answers.values())
    torn = sum(it.renames.torn for it in answers.values())
    stale = sum(it.renames.stale for it in answers.values())
    if missing or torn:
        found.fail(
            f"a rename is not atomic here: of {answers[0].renames.done} renames, readers {missing} "
            f"times found no file and {torn} times a mixed one",
            "keep checkpoints on another file system: --run-dir /other/path",
        )
    elif stale:
        found.warn(
            f"readers lost a file {stale} times while it was replaced (stale file handle)",
            "nothing for training, whose ranks read no file that is being replaced",
        )


def _locks(found: Finding, locks: Race, shared: str) -> None:
    if not locks.holds:
        found.warn(
            f"locks do not hold in {shared}: {locks}; torch's file rendezvous would corrupt its "
            "file there",
            "--init-method tcp (Lockstep takes it by itself); NFS: mount without nolock",
        )


def _space_and_speed(
    found: Finding, answers: Mapping[int, Facts], speeds: Mapping[str, files.Speed]
) -> None:
    space = min(it.space for it in answers.values())
    if space < _GIB:
        report = found.fail if space < _GIB // 10 else found.warn
        report(f"{_size(space)} free", "df -h; remove old runs; another --run-dir")
    for host, speed in speeds.items():
        slowest = min(speed.write, speed.read)
        if slowest < _SLOW:
            found.warn(
                f"{host} writes {speed.write / 1e6:.1f} MB/s there and reads "
                f"{speed.read / 1e6:.1f} MB/s",
                "data sets and checkpoints on a faster file system; fewer checkpoints",
            )


def _delays(answers: Mapping[int, Facts], lab: Lab, hosts: list[str]) -> Matrix:
    rows: list[Any] = [
        [None if delay is None else delay * 1e3 for delay in answers[it.rank].seen]
        for it in sorted(lab.roster.values(), key=lambda it: it.node)
        if it.local_rank == 0
    ]
    return Matrix("when the row's node sees a new file of the column's, ms", hosts, rows)


def _size(number: int) -> str:
    return f"{number / _GIB:.1f} GiB" if number >= _GIB else f"{number / 2**20:.0f} MiB"
