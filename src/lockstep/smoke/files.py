"""What a directory that several nodes share can be relied on for, tried out."""

from __future__ import annotations

import errno
import os
import secrets
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from lockstep.rendezvous.agree import gather
from lockstep.rendezvous.directory import write
from lockstep.rendezvous.locks import Race, race
from lockstep.waiting import wait_until
from lockstep.world import World

# Seconds that a new file may stay hidden; an attribute cache that hid one for 8 was seen.
_VISIBLE = 10.0
# The writer renames for so long, so often at the most; readers wait so much longer for the last.
_RENAMING, _RENAMES, _LAST = 0.5, 300, 5.0
_NUMBERS = 512
_RACES = 4
_END = b"the last"
# What each node writes and reads to see how fast that is: for so long, so much at the most.
_SECONDS, _PIECE, _PIECES = 0.7, 2**20, 64


@dataclass(frozen=True)
class Renames:
    """How often a file was replaced, and what readers met other than a whole file.

    Attributes:
        done: number of renames.
        missing: looks that found no file.
        torn: looks that found parts of two.
        stale: files that were taken away while they were read.
    """

    done: int
    missing: int
    torn: int
    stale: int


@dataclass(frozen=True)
class Speed:
    """Bytes a second; a file is read by another node than the one that wrote it, where there is."""

    write: float
    read: float


def see_each_other(world: World, place: Path) -> tuple[float | None, ...]:
    """Let each node write a number and all ranks read it. Collective.

    Returns:
        for each node, the seconds from when the number was announced until this rank has read it
        in the directory; None if it did not appear.
    """
    leads = world.local_rank == 0
    token = secrets.token_hex(16) if leads else ""
    if leads:
        write(place / f"nonce-{world.node}", token.encode())
    told = {node: text for node, text in gather(world, (world.node, token)) if text}
    start = time.monotonic()
    seen: dict[int, float] = {}

    def all_here() -> bool:
        for node, text in told.items():
            if node not in seen and _read(place / f"nonce-{node}") == text.encode():
                seen[node] = time.monotonic() - start
        return len(seen) == len(told)

    wait_until(all_here, _VISIBLE)
    gather(world, None)
    return tuple(seen.get(node) for node in range(world.nodes))


def rename_under_readers(world: World, place: Path) -> Renames:
    """Replace a file over and over on the root while all ranks read it. Collective."""
    path, done = place / "renamed", [0]
    if world.rank == 0:
        write(path, _content(0))
    gather(world, None)
    writer = threading.Thread(target=_rename, args=(place, path, done), daemon=True)
    if world.rank == 0:
        writer.start()
    missing, torn, stale = _read_until_last(path)
    if world.rank == 0:
        writer.join(_LAST)
    count = gather(world, done[0])[0]
    return Renames(count, missing, torn, stale)


def races(world: World, place: Path) -> Race:
    """Race for a lock several times: where locks do not hold, one race may be won by luck.

    Collective.

    Returns:
        the first in which a record was lost, otherwise all together.
    """
    found = []
    for number in range(_RACES):
        track = place / f"track-{number}"
        if world.rank == 0:
            track.mkdir(mode=0o700)
        found.append(race(world, track))
        if not found[-1].holds:
            return found[-1]
    return Race(sum(one.kept for one in found), sum(one.written for one in found))


def space(place: Path) -> int:
    """Return the bytes that are free for this user, quotas left aside. Local."""
    found = os.statvfs(place)
    return found.f_bavail * found.f_frsize


def kind_of(place: Path) -> str:
    """Return the kind of file system that a directory is on, such as nfs4 or ext4. Local."""
    best, kind = "", "unknown"
    path = os.path.realpath(place)
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return kind
    for line in lines:
        before, _, after = line.partition(" - ")
        point = before.split()[4].replace("\\040", " ")
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        # of several mounts at one point the last counts
        if inside and len(point) >= len(best):
            best, kind = point, after.split()[0]
    return kind


def speed(world: World, place: Path) -> Speed | None:
    """Write a file on each node, then read the next node's. Collective.

    Returns:
        the speeds on the first rank of a node; None on the others.
    """
    leads = world.local_rank == 0
    written = _write_for_a_while(place / f"bulk-{world.node}") if leads else 0.0
    gather(world, None)
    if not leads:
        gather(world, None)
        return None
    read = _read_for_a_while(place / f"bulk-{(world.node + 1) % world.nodes}")
    gather(world, None)
    return Speed(written, read)


def _read(path: Path) -> bytes:
    try:
        # a listing makes some file systems forget that a name was not there
        os.listdir(path.parent)
        return path.read_bytes()
    except OSError:
        return b""


def _content(number: int) -> bytes:
    return b"%08d\n" % number * _NUMBERS


def _rename(place: Path, path: Path, done: list[int]) -> None:
    end = time.monotonic() + _RENAMING
    for number in range(1, _RENAMES + 1):
        beside = place / f"beside-{number}"
        write(beside, _content(number))
        os.replace(beside, path)
        done[0] = number
        if time.monotonic() > end:
            break
    beside = place / "beside-last"
    write(beside, _END)
    os.replace(beside, path)


def _read_until_last(path: Path) -> tuple[int, int, int]:
    """Return how often no file, a mixed file, and a vanished file was met. Local."""
    missing = torn = stale = 0
    end = time.monotonic() + _RENAMING + _LAST
    while time.monotonic() < end:
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            missing += 1
            continue
        except OSError as error:
            if error.errno not in (errno.ESTALE, errno.EIO):
                raise
            stale += 1
            continue
        if content == _END:
            break
        torn += content != content[:9] * _NUMBERS
    return missing, torn, stale


def _write_for_a_while(path: Path) -> float:
    piece, start, pieces = os.urandom(_PIECE), time.monotonic(), 0
    handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        while pieces < _PIECES and time.monotonic() - start < _SECONDS:
            os.write(handle, piece)
            pieces += 1
        os.fsync(handle)
    finally:
        os.close(handle)
    return pieces * _PIECE / (time.monotonic() - start)


def _read_for_a_while(path: Path) -> float:
    total, start = 0, time.monotonic()
    handle = os.open(path, os.O_RDONLY)
    try:
        # what this host has just written itself is in its memory
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        while (content := os.read(handle, _PIECE)) and time.monotonic() - start < 2 * _SECONDS:
            total += len(content)
    finally:
        os.close(handle)
    return total / max(time.monotonic() - start, 1e-6)
