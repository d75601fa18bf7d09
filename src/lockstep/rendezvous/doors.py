"""Do hosts reach each other? Each opens a door, others knock, and what they hear is the proof.

A door is a listening socket that answers every caller with a number drawn for it. So an address
that leads to another host's socket, or to another program, is not taken for the right one.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from lockstep.rendezvous.agree import arrive, gather
from lockstep.waiting import wait_until
from lockstep.world import World

# Seconds that a knock may take. A host in the same cluster answers in milliseconds; a firewall that
# drops does not answer at all.
KNOCK = 4.0
# So many may wait to be answered.
_CALLERS = 1024


@dataclass(frozen=True)
class Target:
    """A door to knock at: an address or name, a port, and the number to be heard."""

    address: str
    port: int
    number: bytes


@dataclass
class Door:
    """A listening socket of this host, on all its addresses."""

    socket: socket.socket
    number: bytes = field(default_factory=lambda: secrets.token_bytes(16))

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self.socket.getsockname()[1])

    def answer(self) -> None:
        """Tell the number to whoever has knocked. Local; does not wait."""
        with contextlib.suppress(OSError):
            caller, _ = self.socket.accept()
            with caller:
                caller.sendall(self.number)


def open_door(port: int = 0, address: str = "") -> Door:
    """Listen on this host. Local.

    Args:
        port: 0 lets the system choose one that is free.
        address: of IPv4, at which to listen; "" for all addresses of this host.

    Raises:
        OSError: the port is in use, or not allowed.
    """
    listener = socket.create_server((address, port), backlog=_CALLERS) if address else _all(port)
    listener.setblocking(False)
    return Door(listener)


def _all(port: int) -> socket.socket:
    try:
        return socket.create_server(
            ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_CALLERS
        )
    except (OSError, ValueError):  # no IPv6 here; if it was the port, the next line says so
        return socket.create_server(("", port), backlog=_CALLERS)


def knock(target: Target, seconds: float = KNOCK) -> str:
    """Knock once; return "" if the right door answered, otherwise what happened. Local."""
    try:
        with socket.create_connection((target.address, target.port), timeout=seconds) as caller:
            heard = b""
            while len(heard) < len(target.number) and (part := caller.recv(64)):
                heard += part
    except TimeoutError:
        return f"no answer in {seconds:g} s"
    except OSError as error:
        return error.strerror or str(error)
    return "" if heard == target.number else "another program answers there"


def knock_at(world: World, door: Door | None, targets: Sequence[Target]) -> list[dict[str, str]]:
    """Let every rank knock at its targets while the doors are answered. Collective.

    Args:
        door: this rank's own door, None if it has none.
        targets: whom this rank is to reach; none for most ranks.

    Returns:
        for each rank, in rank order, what it heard at each address: "" is success.
    """

    def answer() -> None:
        if door is not None:
            door.answer()

    heard: dict[str, str] = {}
    if targets:
        with ThreadPoolExecutor(len(targets)) as pool:
            knocks = [pool.submit(knock, target) for target in targets]

            def all_done() -> bool:
                answer()
                return all(it.done() for it in knocks)

            # a name that is looked up in vain takes longer than a knock
            wait_until(all_done, 10 * KNOCK)
        heard = {target.address: it.result() for target, it in zip(targets, knocks, strict=True)}
    arrive(world, meanwhile=answer)
    return gather(world, heard)
