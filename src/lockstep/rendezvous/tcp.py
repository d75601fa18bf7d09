"""Meet at a TCP port of the root, at an address that every other host has reached before."""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist

from lockstep.errors import RendezvousError
from lockstep.rendezvous import interfaces
from lockstep.rendezvous.agree import STEP, Trouble, agree, combine, from_root, gather, shorten
from lockstep.rendezvous.doors import Door, Target, knock_at, open_door
from lockstep.rendezvous.interfaces import Host
from lockstep.world import World

_LOCAL = "127.0.0.1"
# The server is listening by then.
_CONNECT = timedelta(seconds=STEP)


def open_store(world: World, timeout: timedelta, host: str = "", port: int = 0) -> dist.TCPStore:
    """Open a store that all ranks share: a server on the root, announced over MPI. Collective.

    Args:
        world: the ranks that share it.
        timeout: limit of a rank's connecting and of its later requests.
        host: name or address of the root's host; by default one is found that all hosts reach.
        port: TCP port on the root's host; by default one that is free.

    Returns:
        a store whose port has been held from before it was announced, so nobody can take it.

    Raises:
        RendezvousError: on all ranks, if the root cannot open the port, or some host cannot reach
            it; the message names the hosts and what each of them tried.
    """
    door, trouble = _open(port, where_to_listen(world, host)) if world.rank == 0 else (None, None)
    try:
        agree(world, trouble)
        place = from_root(world, (door.port, door.number) if door is not None else None)
        assert place is not None
        address = find_address(world, door, host, *place)
        if door is None:
            # the server is listening: at worst it waits in the queue until the root gets there
            return _connect(world, address, place[0], timeout)
        return _serve(world, door, address, timeout)
    finally:
        if door is not None:
            door.socket.close()


def _open(port: int, where: str) -> tuple[Door | None, Trouble | None]:
    try:
        return open_door(port, where), None
    except OSError as error:
        which = f"TCP port {port}" if port else "a TCP port"
        return None, Trouble(
            f"the root cannot open {which} for torch's store: {error.strerror}",
            needed="a free TCP port on the root's host",
            cure='leave the choice to the system (rendezvous="tcp", or MASTER_PORT unset); '
            "`ss -ltn` shows who has the port",
        )


def where_to_listen(world: World, host: str = "") -> str:
    """Return where the root listens: at IPv4 addresses if they will do, "" for all. Local.

    torch's server looks up the name of every caller. Of one that comes by IPv4 to a socket for both
    it asks the DNS alone, not /etc/hosts, and where no DNS answers that takes 5 s a caller.

    Args:
        world: the ranks; those of one node need no address that others could reach.
        host: name or address that they were told to use, if they were.
    """
    if world.nodes == 1 and not host:
        return _LOCAL
    return "" if ":" in interfaces.resolve(host or socket.gethostname()) else "0.0.0.0"


def find_address(world: World, door: Door | None, host: str, port: int, number: bytes) -> str:
    """Return an address of the root's host that every node has reached. Collective.

    Args:
        world: the ranks.
        door: on the root, the open port.
        host: name or address to try; "" tries all that the root's host has.
        port, number: of the door, known to all ranks.

    Raises:
        RendezvousError: on all ranks, if there is none.
    """
    if world.nodes == 1 and not host:
        return _LOCAL
    candidates = [host] if host else _candidates(world)
    asked = world.local_rank == 0 and (world.node > 0 or bool(host))
    targets = [Target(address, port, number) for address in candidates] if asked else []
    heard = knock_at(world, door, targets)
    for address in candidates:
        if all(not one.get(address) for one in heard):
            return address
    hosts = gather(world, world.host)
    error = combine(
        [(name, _unreached(one, hosts[0], port)) for name, one in zip(hosts, heard, strict=True)]
    )
    if error is None:
        raise _no_address(hosts[0])
    raise error


def _candidates(world: World) -> list[str]:
    """Return the addresses at which the root's host may be reached, best first. Collective."""
    mine = None
    if world.local_rank == 0:
        name = socket.gethostname()
        mine = Host(name, interfaces.resolve(name), interfaces.of_this_host())
    hosts = [host for host in gather(world, mine) if host is not None]
    return interfaces.addresses_for_others(hosts, node=0)


def _unreached(heard: dict[str, str], root: str, port: int) -> Trouble | None:
    failures = [f"{address} ({reason})" for address, reason in heard.items() if reason]
    if not failures:
        return None
    return Trouble(
        f"cannot reach the root on {root} at TCP port {port}: tried {shorten(failures)}",
        needed="an address of the root's host that every other host reaches",
        cure="`ip -brief address` on both hosts and `ping` show which network they share; a "
        "firewall must let the ranks through; MASTER_ADDR with rendezvous='env' names an address",
    )


def _no_address(root: str) -> RendezvousError:
    return RendezvousError(
        f"the root's host {root} has no address that other hosts could reach: "
        "only loopback, or addresses that other hosts have as well",
        needed="a network interface with an address of its own on every host",
        cure="`ip -brief address` shows the interfaces; MASTER_ADDR with rendezvous='env' names "
        "an address",
    )


def _serve(world: World, door: Door, address: str, timeout: timedelta) -> dist.TCPStore:
    port, handle = door.port, door.socket.detach()
    return dist.TCPStore(
        address, port, world.size, True, timeout, wait_for_workers=False, master_listen_fd=handle
    )


def _connect(world: World, address: str, port: int, timeout: timedelta) -> dist.TCPStore:
    store = dist.TCPStore(address, port, world.size, False, min(timeout, _CONNECT))
    store.set_timeout(timeout)
    return store
