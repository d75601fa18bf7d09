"""A fresh place in a shared directory, and the proof that all ranks see the same one.

The root makes a directory of its own inside of the shared one, under a name that was never used
before. So nobody meets what an earlier run has left, nobody but the owner can look inside, and no
attribute cache on another host can hold an older answer for the name.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from lockstep.launcher import job_name
from lockstep.rendezvous.agree import Trouble, agree, from_root, limited
from lockstep.waiting import wait_until
from lockstep.world import World

# Seconds that an attribute cache may hide a new name from another host; 8 were seen.
VISIBLE = 12.0
# Seconds for one request to a file system; a mount whose server is gone hangs for ever.
ANSWER = 15.0
_PROOF = "proof"


@contextlib.contextmanager
def fresh_place(world: World, shared: Path) -> Iterator[Path]:
    """Make a directory for this start alone, seen by all ranks; remove it at the end. Collective.

    At the end the root removes it; after an exception, whoever has it, since the root may be gone
    by then. Neither waits for another rank.

    Args:
        shared: a directory that all ranks can write to.

    Yields:
        the new directory; only its owner may enter.

    Raises:
        RendezvousError: on all ranks, naming those where the directory is missing, cannot be
            written, does not answer, or is another one than the root's.
    """
    trouble = _checked(shared)
    agree(world, trouble)
    name, proof = _name(), secrets.token_hex(16)
    place = shared / name if world.rank == 0 else None
    try:
        agree(world, _make(place, proof) if place is not None else None)
        name, proof = from_root(world, (name, proof))
        place = shared / name
        agree(world, _find(place, proof))
        yield place
    except BaseException:
        if place is not None:
            _remove(place)
        raise
    if world.rank == 0:
        _remove(place)


def _checked(shared: Path) -> Trouble | None:
    """Say why the directory cannot be used by this rank, None if it can. Local."""
    try:
        return limited(lambda: _look_at(shared), ANSWER)
    except TimeoutError:
        return Trouble(
            f"the directory {shared} does not answer: no result in {ANSWER:g} s",
            needed="a shared directory whose file server answers",
            cure=f"`ls {shared}` on that host; if it hangs, the mount is at fault; "
            'rendezvous="tcp" needs no directory',
        )


def _look_at(shared: Path) -> Trouble | None:
    if not shared.exists():
        found = f"the directory {shared} does not exist"
    elif not shared.is_dir():
        found = f"{shared} is a file"
    elif not os.access(shared, os.W_OK | os.X_OK):
        found = f"the directory {shared} cannot be written to"
    else:
        return None
    return Trouble(
        found,
        needed="one directory, shared by all hosts, that every rank can write to; "
        "in it a fresh file is made for each start",
        cure=f"`df {shared}` on that host shows whether it is mounted there; `mkdir -p` makes it; "
        'rendezvous="tcp" needs no directory',
    )


def _name() -> str:
    job = re.sub(r"[^A-Za-z0-9._-]", "_", job_name())[:60]
    return f"lockstep-{job}-{secrets.token_hex(8)}"


def _make(place: Path, proof: str) -> Trouble | None:
    """Make the directory, and in it a file that holds the proof. Local, on the root."""

    def make() -> None:
        place.mkdir(mode=0o700)
        write(place / _PROOF, proof.encode())

    try:
        limited(make, ANSWER)
    except OSError as error:  # TimeoutError is one
        shared = place.parent
        return Trouble(
            f"the root cannot make a directory in {shared}: {error.strerror or error}",
            needed="a shared directory that the root can write to, with room",
            cure=f"`df {shared}`, `ls -ld {shared}`, and the quota",
        )
    return None


def write(path: Path, content: bytes) -> None:
    """Make a file that nobody else can read, whole and on the server when this returns. Local."""
    handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
    try:
        os.write(handle, content)
        os.fsync(handle)
    finally:
        os.close(handle)


def _find(place: Path, proof: str) -> Trouble | None:
    """Wait until the root's number can be read at the place; say so if it never can. Local."""
    reason = "nothing is there"

    def is_here() -> bool:
        nonlocal reason
        try:
            # a listing makes some file systems forget that a name was not there
            os.listdir(place.parent)
            found = (place / _PROOF).read_text()
        except OSError as error:
            reason = os.strerror(error.errno or errno.EIO)
            return False
        reason = "it holds something else"
        return found == proof

    with contextlib.suppress(TimeoutError):
        if limited(lambda: wait_until(is_here, VISIBLE), VISIBLE + ANSWER):
            return None
    return Trouble(
        f"{place.parent} is not the directory that the root sees: what the root made there "
        f"did not appear within {VISIBLE:g} s ({reason})",
        needed="one directory, shared by all hosts",
        cure=f"`df {place.parent}` on both hosts: is the shared file system mounted on each? "
        'rendezvous="tcp" needs no directory',
    )


def _remove(place: Path) -> None:
    """Remove the place with all that is in it, as far as the file system lets us. Local."""

    def remove() -> None:
        # A FileStore that goes on another rank at this moment makes its file anew.
        for _ in range(3):
            shutil.rmtree(place, ignore_errors=True)
            if not place.exists():
                break

    with contextlib.suppress(TimeoutError):
        limited(remove, ANSWER)
