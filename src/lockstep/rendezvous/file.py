"""Meet in a fresh file on a shared path."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from lockstep.rendezvous.agree import Trouble, agree
from lockstep.rendezvous.directory import write
from lockstep.rendezvous.locks import race
from lockstep.world import World


def open_in(world: World, place: Path, timeout: timedelta, insist: bool) -> dist.Store | None:
    """Open a store in a directory that this start has for itself. Collective.

    Args:
        place: made by `fresh_place`.
        timeout: limit of later requests.
        insist: use the file also where locks do not hold across hosts.

    Returns:
        the store; None if locks do not hold. The root says so.

    Raises:
        RendezvousError: on all ranks, if some rank cannot open the file.
    """
    result = race(world, place)
    if not result.holds:
        if world.rank == 0:
            what = "used all the same, as was asked for" if insist else "TCP is used instead"
            sys.stderr.write(
                f"lockstep: locks do not hold across hosts in {place.parent} ({result}), and "
                f"torch's FileStore relies on them: {what}\n"
            )
        if not insist:
            return None
    path = place / "store"
    agree(world, _made(path) if world.rank == 0 else None)
    store, trouble = _opened(path, world.size)
    agree(world, trouble)
    assert store is not None
    store.set_timeout(timeout)
    return store


def _made(path: Path) -> Trouble | None:
    try:
        write(path, b"")
    except OSError as error:
        return _refused(path, str(error.strerror))
    return None


def _opened(path: Path, size: int) -> tuple[dist.FileStore | None, Trouble | None]:
    try:
        return dist.FileStore(str(path), size), None
    except RuntimeError as error:
        return None, _refused(path, str(error).splitlines()[0])


def _refused(path: Path, reason: str) -> Trouble:
    return Trouble(
        f"torch's FileStore cannot be opened at {path}: {reason}",
        needed="a shared directory in which every rank can make and lock files",
        cure='rendezvous="tcp" needs no directory',
    )
