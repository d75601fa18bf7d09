"""Meeting points for torch.distributed that need more than MPI."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from datetime import timedelta

import torch.distributed as dist

from lockstep.errors import LaunchError
from lockstep.world import World


def open_store(world: World, timeout: timedelta) -> dist.Store:
    """Open a store that all ranks share: a server on the root, announced over MPI. Collective.

    Args:
        world: the ranks that share it.
        timeout: limit of a rank's connecting and of its later requests.

    Returns:
        a store under a port that was free a moment ago and is held from then on.

    Raises:
        LaunchError: on all ranks, if the root cannot open a port.
    """
    server: dist.TCPStore | None = None
    offer: tuple[str, int, str] = ("", 0, "")
    host = "127.0.0.1" if world.nodes == 1 else _reachable_address()
    if world.rank == 0:
        try:
            # Port 0 lets the system choose one that is free, and keeps it: no race.
            server = dist.TCPStore(host, 0, world.size, True, timeout, wait_for_workers=False)
            offer = (host, server.port, "")
        except RuntimeError as error:
            offer = ("", 0, str(error).splitlines()[0])
    address, port, trouble = world.comm.bcast(offer, root=0)
    if trouble:
        raise LaunchError(
            f"the root cannot open a TCP port for torch's store: {trouble}",
            needed="one free TCP port on the root's host",
            cure="see what limits ports there (ulimit -n, a firewall)",
        )
    if server is not None:
        return server
    return dist.TCPStore(address, port, world.size, False, timeout)


def _reachable_address() -> str:
    """Return an address of this host that other hosts can reach: never 127.x."""
    candidates: list[str] = []
    with contextlib.suppress(OSError):
        infos = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        candidates += [str(info[4][0]) for info in infos]
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket sends nothing; it only asks which way out the kernel takes.
        probe.connect(("192.0.2.1", 9))
        candidates.append(probe.getsockname()[0])
    for candidate in candidates:
        if not ipaddress.ip_address(candidate.split("%")[0]).is_loopback:
            return candidate
    return socket.gethostname()
