"""Which network gloo uses: checked on every host before gloo opens.

gloo takes the address that the host's own name resolves to. Where that is 127.0.1.1, as Debian's
installer writes it, or the address of a docker0 that every host has, its hosts look for each other
in themselves.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

from lockstep.errors import RendezvousError
from lockstep.rendezvous import interfaces
from lockstep.rendezvous.agree import Trouble, agree, gather, shorten
from lockstep.rendezvous.doors import Target, knock_at, open_door
from lockstep.rendezvous.interfaces import Host
from lockstep.world import World

VARIABLE = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True)
class Candidate:
    """A choice of one address on each host.

    Attributes:
        label: for messages.
        names: the interface on each host, in order of the nodes; "" leaves the choice to gloo.
        addresses: the address on each host; "" where there is none.
    """

    label: str
    names: tuple[str, ...]
    addresses: tuple[str, ...]


def choose_interface(world: World) -> dict[str, str]:
    """Find the network for gloo, and say so on the root if it is not gloo's own choice. Collective.

    A GLOO_SOCKET_IFNAME that is set is kept, and checked; hosts where it is not set take the
    interface in the same network.

    Returns:
        the variables to set in this process before gloo opens; empty if gloo's choice is right.

    Raises:
        RendezvousError: on all ranks, if an interface does not exist, or no network connects all
            hosts; the message names what each host has and what was tried.
    """
    wanted = os.environ.get(VARIABLE, "")
    mine = interfaces.of_this_host()
    agree(world, _missing(wanted, [it.name for it in mine]))
    if world.nodes == 1:
        # nothing leaves the host, so nothing of its network can be in the way
        return {VARIABLE: "lo"} if not wanted and any(it.name == "lo" for it in mine) else {}
    hosts, heard = _survey(world, wanted, mine)
    chosen, failures = pick(hosts, heard)
    if chosen is None:
        raise _nothing_fits(hosts, failures)
    name = chosen.names[world.node]
    if wanted or not name:
        return {}
    if world.rank == 0:
        sys.stderr.write(f"lockstep: {_reason(failures)}{VARIABLE}={name} is set: {chosen.label}\n")
    return {VARIABLE: name}


def candidates(hosts: Sequence[Host]) -> list[Candidate]:
    """Return what may serve, best first; what the user asked for is the only one. Local."""
    asked = next((host for host in hosts if host.wanted), None)
    if asked is not None:
        return [_as_asked(hosts, asked)]
    own = tuple(
        host.address if interfaces.is_loopback(host.address) or host.has(host.address) else ""
        for host in hosts
    )
    found = [Candidate("the address of each host's own name", ("",) * len(hosts), own)]
    for network in interfaces.common_networks(hosts):
        inside = [it for host in hosts if (it := host.inside(network))]
        names, addresses = zip(*((it.name, it.address) for it in inside), strict=True)
        found.append(Candidate(f"network {network}", names, addresses))
    return found


def pick(
    hosts: Sequence[Host], heard: Sequence[dict[str, str]]
) -> tuple[Candidate | None, list[str]]:
    """Return the first candidate at which all knocks were heard, and why not those before. Local.

    Args:
        heard: what each host heard at each address that it knocked at; "" is success.
    """
    failures: list[str] = []
    for candidate in candidates(hosts):
        reason = interfaces.unfit(candidate.addresses)
        if reason and "" in candidate.addresses:
            host = hosts[candidate.addresses.index("")]
            what = f"{host.address}, on no interface of it" if host.address else "none"
            reason = f"on {host.name} that is {what}"
        for host, one in zip(hosts, heard, strict=True):
            for address in candidate.addresses:
                if not reason and one.get(address):
                    reason = f"from {host.name} to {address}: {one[address]}"
        if not reason:
            return candidate, failures
        failures.append(f"{candidate.label}: {reason}")
    return None, failures


def _survey(
    world: World, wanted: str, mine: tuple[interfaces.Interface, ...]
) -> tuple[list[Host], list[dict[str, str]]]:
    """Learn what each host has, and let each knock at the next one and the root's. Collective.

    Returns:
        the hosts, and what each of them heard, both in order of the nodes.
    """
    leads = world.local_rank == 0
    door = open_door() if leads else None
    try:
        offer = None
        if door is not None:
            name = socket.gethostname()
            host = Host(name, interfaces.resolve(name), mine, wanted.partition(",")[0])
            offer = (world.node, host, door.port, door.number, world.rank)
        offers = sorted((it for it in gather(world, offer) if it is not None), key=itemgetter(0))
        hosts = [offer[1] for offer in offers]
        targets = []
        if leads:
            others = dict.fromkeys(((world.node + 1) % world.nodes, 0))
            for candidate in candidates(hosts):
                if not interfaces.unfit(candidate.addresses):
                    targets += [
                        Target(candidate.addresses[node], *offers[node][2:4])
                        for node in others
                        if node != world.node
                    ]
        heard = knock_at(world, door, list(dict.fromkeys(targets)))
        return hosts, [heard[rank] for _, _, _, _, rank in offers]
    finally:
        if door is not None:
            door.socket.close()


def _as_asked(hosts: Sequence[Host], asked: Host) -> Candidate:
    model = asked.named(asked.wanted)
    network = model.network if model else ""
    found = [host.named(host.wanted) if host.wanted else host.inside(network) for host in hosts]
    return Candidate(
        f"{VARIABLE}={asked.wanted}",
        tuple(it.name if it else "" for it in found),
        tuple(it.address if it else "" for it in found),
    )


def _missing(wanted: str, names: Sequence[str]) -> Trouble | None:
    missing = [name for name in wanted.split(",") if name and name not in names]
    if not missing:
        return None
    return Trouble(
        f"{VARIABLE}={wanted}, but here is no interface {missing[0]} that is up and has an "
        f"IPv4 address; there are {', '.join(names) or 'none'}",
        needed="an interface of each host, in a network that all hosts share",
        cure=f"unset {VARIABLE}: the interface is then found; or name one of `ip -brief address`",
    )


def _nothing_fits(hosts: Sequence[Host], failures: Sequence[str]) -> RendezvousError:
    have = []
    for host in hosts:
        names = [f"{it.name} {it.address}/{it.bits}" for it in host.interfaces if it.name != "lo"]
        have.append(f"{host.name} ({', '.join(names) or 'none'})")
    return RendezvousError(
        f"gloo finds no network that connects all {len(hosts)} hosts: {shorten(have)}; "
        f"tried: {'; '.join(failures)}",
        needed="on each host an interface in one network, with an address of its own",
        cure=f"`ip -brief address` on each host; {VARIABLE} names the interface where only you "
        'know it; backend="mpi" takes the network that MPI uses',
    )


def _reason(failures: Sequence[str]) -> str:
    return f"gloo cannot use {failures[0]}; " if failures else ""
