"""Meet where MASTER_ADDR and MASTER_PORT say, and let the variables say what MPI says."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from datetime import timedelta

import torch.distributed as dist

from lockstep.rendezvous.agree import Trouble, agree, from_root
from lockstep.rendezvous.tcp import open_store
from lockstep.world import World

_PLACE = ("MASTER_ADDR", "MASTER_PORT")


def contradiction(world: World, environ: Mapping[str, str]) -> Trouble | None:
    """Say which variable contradicts MPI, None if none does. Local."""
    true = {"RANK": world.rank, "WORLD_SIZE": world.size, "LOCAL_RANK": world.local_rank}
    wrong = [
        f"{name}={environ[name]} in the environment, but MPI says {value}"
        for name, value in true.items()
        if environ.get(name, str(value)).strip() != str(value)
    ]
    if not wrong:
        return None
    return Trouble(
        "; ".join(wrong),
        needed="RANK, WORLD_SIZE and LOCAL_RANK unset, or as MPI has them",
        cure="`unset RANK WORLD_SIZE LOCAL_RANK` before mpirun or srun; they are set from MPI",
    )


def place(environ: Mapping[str, str]) -> tuple[str, int, Trouble | None]:
    """Return host and port that the variables name; "" and 0 where they name none. Local."""
    host, text = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if not text:
        return host, 0, None
    if text.isdecimal() and 0 < int(text) < 2**16:
        return host, int(text), None
    trouble = Trouble(
        f"MASTER_PORT={text!r}",
        needed="a TCP port from 1 to 65535, or no MASTER_PORT: then a free one is taken",
        cure="`unset MASTER_PORT`, or set a number",
    )
    return host, 0, trouble


@contextlib.contextmanager
def open_from_environment(world: World, timeout: timedelta) -> Iterator[dist.TCPStore]:
    """Open a store at MASTER_ADDR and MASTER_PORT; fill in what is not set. Collective.

    What is filled in: the two where they are missing, RANK, WORLD_SIZE and LOCAL_RANK. At the end
    the environment is again what it was.

    Raises:
        RendezvousError: on all ranks, if a variable contradicts MPI or another rank's, or the
            place cannot be opened or reached.
    """
    trouble = contradiction(world, os.environ)
    host, port, wrong_port = place(os.environ)
    agree(world, trouble or wrong_port)
    # mpirun may not have taken the root's variables along, so the others' may be empty
    root_host, root_port = from_root(world, (host, port))
    agree(world, _differs((host, port), (root_host, root_port)))
    store = open_store(world, timeout, root_host, root_port)
    filled = {
        "MASTER_ADDR": root_host or store.host,
        "MASTER_PORT": str(store.port),
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.size),
        "LOCAL_RANK": str(world.local_rank),
    }
    with variables(filled):
        yield store


@contextlib.contextmanager
def variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables of the environment, and restore them at the end. Local."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _differs(mine: tuple[str, int], root: tuple[str, int]) -> Trouble | None:
    for name, own, theirs in zip(_PLACE, mine, root, strict=True):
        if own and own != theirs:
            return Trouble(
                f"{name}={own} here, {theirs or 'not set'} at the root",
                needed="the same on all ranks, or set at the root alone",
                cure=f"export {name} before mpirun, and let nothing on the nodes change it",
            )
    return None
