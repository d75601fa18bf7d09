"""Choose where the ranks meet, by what the user wrote."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import cast

import torch.distributed as dist

from lockstep.rendezvous.agree import Trouble
from lockstep.rendezvous.directory import fresh_place
from lockstep.rendezvous.env import open_from_environment
from lockstep.rendezvous.file import open_in
from lockstep.rendezvous.tcp import open_store
from lockstep.world import World

_FILE, _INSIST = "file://", "file!://"
_NEEDED = (
    'None, "tcp", "tcp://HOST:PORT", "env", "file:///SHARED/DIRECTORY", or "file!:///…" to insist '
    "on the file where locks do not hold"
)


@dataclass(frozen=True)
class Place:
    """Where the ranks meet.

    Attributes:
        kind: "file", "tcp" or "env".
        directory: the shared one; for "file".
        insist: use the file even if locks do not hold across hosts.
        host: name or address of the root's host, "" for one that is found; for "tcp".
        port: 0 for one that is free; for "tcp".
    """

    kind: str
    directory: Path = Path()
    insist: bool = False
    host: str = ""
    port: int = 0


def parse(text: str) -> Place | Trouble:
    """Read a rendezvous as the user writes it. Local."""
    for prefix in (_FILE, _INSIST):
        if text.startswith(prefix):
            path = text.removeprefix(prefix)
            if not path.startswith("/"):
                return _refused(text, f"`{prefix}{path}` has no absolute path; three slashes")
            return Place("file", Path(path), insist=prefix == _INSIST)
    if text in ("env", "env://"):
        return Place("env")
    if text in ("tcp", "tcp://"):
        return Place("tcp")
    if text.startswith("tcp://"):
        host, _, port = text.removeprefix("tcp://").rpartition(":")
        if host and port.isdecimal() and int(port) < 2**16:
            return Place("tcp", host=host.strip("[]"), port=int(port))
    return _refused(text, "write one of these")


@contextlib.contextmanager
def meet(world: World, place: Place, timeout: timedelta) -> Iterator[tuple[dist.Store, str]]:
    """Open a store that all ranks share, and clear up at the end. Collective.

    Leaving waits for nobody, so that a rank can leave by an exception.

    Args:
        place: the same on all ranks.
        timeout: limit of requests to the store.

    Yields:
        the store, and in a few words where it is.

    Raises:
        RendezvousError: on all ranks.
    """
    if place.kind == "env":
        with open_from_environment(world, timeout) as store:
            yield store, f"env (tcp://{store.host}:{store.port})"
    elif place.kind == "file":
        with fresh_place(world, place.directory) as directory:
            # Only the caller keeps the store: a FileStore looks for its file when it goes, and has
            # to be gone on all ranks before the root removes the place.
            opened = [open_in(world, directory, timeout, place.insist)]
            if opened[0] is not None:
                yield cast("dist.Store", opened.pop()), f"file://{directory}"
            else:
                tcp = open_store(world, timeout)
                yield tcp, f"tcp://{tcp.host}:{tcp.port}"
    else:
        tcp = open_store(world, timeout, place.host, place.port)
        yield tcp, f"tcp://{tcp.host}:{tcp.port}"


def _refused(text: str, cure: str) -> Trouble:
    return Trouble(f"rendezvous={text!r}", needed=_NEEDED, cure=cure)
