"""Check the network: which one gloo takes, whether all pairs connect, and how fast each link is."""

from __future__ import annotations

import socket
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from lockstep.rendezvous import choose_interface, interfaces
from lockstep.rendezvous.agree import gather
from lockstep.rendezvous.doors import Target, knock_at, open_door
from lockstep.rendezvous.gloo import VARIABLE
from lockstep.rendezvous.interfaces import Host
from lockstep.smoke.check import Check, Finding, Lab
from lockstep.smoke.links import Link, measure
from lockstep.smoke.pictures import Matrix, Picture
from lockstep.world import World

# A link is odd if it is so many times slower than the median link; the shortest trips vary more.
_ODD_BANDWIDTH, _ODD_LATENCY = 3.0, 10.0
# Bytes a second below which a link is slow by itself: half of what gigabit Ethernet gives.
_SLOW = 60e6
# On one node, so many of its ranks are measured.
_ON_ONE_NODE = 8


@dataclass(frozen=True)
class Facts:
    """What the first rank of a node knows of its host's network; other ranks have no host.

    Attributes:
        host: its name, what that resolves to, its interfaces.
        chosen: what GLOO_SOCKET_IFNAME has to be; "" if gloo finds it by itself.
        heard: by address of another host, why no connection came about; "" is success.
        links: those that this rank has measured.
    """

    host: Host | None
    chosen: str
    heard: dict[str, str]
    links: tuple[Link, ...]


class Network(Check):
    """Whether all hosts reach each other, and which link is slower than the others."""

    name = "network"
    question = "Which network does gloo take, do all pairs connect, and how fast is each link?"
    limit = 25.0
    together = True

    def measure(self, lab: Lab) -> Facts:
        """Choose the interface, knock at all hosts, then play ping-pong."""
        world = lab.world
        chosen = choose_interface(world).get(VARIABLE, "")
        host, heard = _knock(world, chosen)
        links = measure(world, points(world))
        return Facts(host, chosen if world.nodes > 1 else "", heard, tuple(links))

    def judge(self, answers: Mapping[int, Facts], lab: Lab) -> Finding:
        """Name hosts whose own name misleads, pairs that do not connect, and odd links."""
        links = [link for it in answers.values() for link in it.links]
        found = Finding(_summary(links, lab))
        for rank, it in answers.items():
            _own_name(found, it, lab)
            for address, reason in it.heard.items():
                if reason:
                    found.fail(
                        f"{lab.roster[rank].host} cannot connect to {address}: {reason}",
                        f"ssh {lab.roster[rank].host} ping -c 1 {address.partition(':')[0]}   "
                        "# a firewall? a cut cable?",
                    )
        _odd(found, links, lab)
        names = _labels(links, lab)
        found.details = {
            "interfaces": {
                it.host.name: {"own name": it.host.address, VARIABLE: it.chosen or "not needed"}
                | {one.name: f"{one.address}/{one.bits}" for one in it.host.interfaces}
                for it in answers.values()
                if it.host is not None
            },
            "links": [
                {
                    "between": [names[link.a], names[link.b]],
                    "latency_us": link.latency * 1e6,
                    "bandwidth_MB_s": link.bandwidth / 1e6,
                }
                for link in links
            ],
        }
        if links:
            found.pictures = _pictures(links, names)
        return found


def points(world: World) -> list[int]:
    """Return the ranks between which links are measured: one a node. Collective.

    On a single node it is its first few ranks, so that there is something to see.
    """
    leaders = [rank for rank, leads in enumerate(gather(world, world.local_rank == 0)) if leads]
    return leaders if len(leaders) > 1 else list(range(min(world.size, _ON_ONE_NODE)))


def _knock(world: World, chosen: str) -> tuple[Host | None, dict[str, str]]:
    """Knock at every other host, at the address that gloo will use there. Collective."""
    if world.local_rank != 0:
        gather(world, None)
        return None, knock_at(world, None, [])[world.rank]
    name, mine = socket.gethostname(), interfaces.of_this_host()
    host = Host(name, interfaces.resolve(name), mine)
    it = host.named(chosen)
    door = open_door()
    try:
        offer = (world.node, it.address if it else host.address, door.port, door.number)
        offers = sorted((one for one in gather(world, offer) if one), key=itemgetter(0))
        targets = [Target(*one[1:]) for one in offers if one[0] != world.node]
        return host, knock_at(world, door, targets)[world.rank]
    finally:
        door.socket.close()


def _own_name(found: Finding, it: Facts, lab: Lab) -> None:
    if it.host is None or lab.world.nodes == 1:
        return
    if interfaces.is_loopback(it.host.address):
        found.warn(
            f"on {it.host.name} its own name means {it.host.address}: gloo would look for the "
            "others there",
            f"remove {it.host.name} from the line {it.host.address} of /etc/hosts on "
            f"{it.host.name}; or export {VARIABLE}={it.chosen} (lockstep.session does)",
        )
    elif it.chosen:
        found.warn(
            f"on {it.host.name} its own name means {it.host.address or 'nothing'}, which not all "
            f"hosts reach; {it.chosen} is reached by all",
            f"export {VARIABLE}={it.chosen} (lockstep.session does)",
        )


def _labels(links: Sequence[Link], lab: Lab) -> dict[int, str]:
    ranks = sorted({rank for link in links for rank in (link.a, link.b)})
    if lab.world.nodes > 1:
        return {rank: lab.roster[rank].host for rank in ranks}
    return {rank: f"rank {rank}" for rank in ranks}


def _summary(links: Sequence[Link], lab: Lab) -> str:
    if not links:
        return "one rank: no links"
    latency = statistics.median(link.latency for link in links)
    bandwidth = statistics.median(link.bandwidth for link in links)
    where = "between nodes" if lab.world.nodes > 1 else "within the node"
    links_ = "1 link" if len(links) == 1 else f"{len(links)} links"
    return f"{links_} {where}: median {latency * 1e6:.1f} µs, {bandwidth / 1e6:.0f} MB/s"


def _odd(found: Finding, links: Sequence[Link], lab: Lab) -> None:
    """Name the links that are much slower than most; a node all of whose links are, by itself."""
    if lab.world.nodes < 2 or not links:
        return
    names = _labels(links, lab)
    fast = _usual([(link, link.bandwidth) for link in links], max)
    quick = _usual([(link, link.latency) for link in links], min)
    slow = [
        link for link in links if link.bandwidth * _ODD_BANDWIDTH < fast or link.bandwidth < _SLOW
    ]
    usual = f"usual is {fast / 1e6:.0f} MB/s"
    for rank, name in names.items():
        own = [link for link in links if rank in (link.a, link.b)]
        if len(own) > 1 and all(link in slow for link in own):
            worst = min(link.bandwidth for link in own)
            found.warn(
                f"{name}: all its links are slow, {worst / 1e6:.1f} MB/s; {usual}",
                f"ssh {name} ethtool IFACE   # speed, duplex, errors; the cable, the switch's port",
            )
            slow = [link for link in slow if link not in own]
    late = [link for link in links if link.latency > _ODD_LATENCY * quick and link not in slow]
    for link in slow + late:
        cure = f"ssh {names[link.a]} traceroute {names[link.b]}   # another switch? a busy link?"
        if link in late and lab.crowded:
            cure = "a core for each rank first: a rank without one answers late"
        found.warn(
            f"between {names[link.a]} and {names[link.b]}: {link.latency * 1e6:.0f} µs, "
            f"{link.bandwidth / 1e6:.1f} MB/s; {usual}, {quick * 1e6:.0f} µs",
            cure,
        )


def _usual(values: Sequence[tuple[Link, float]], best: Callable[[list[float]], float]) -> float:
    """Return the median over the points of what each has on its best link. Local.

    So a point all of whose links are bad does not spoil what is usual, also among three.
    """
    of_point: dict[int, list[float]] = {}
    for link, value in values:
        for point in (link.a, link.b):
            of_point.setdefault(point, []).append(value)
    return statistics.median(best(own) for own in of_point.values())


def _pictures(links: Sequence[Link], names: Mapping[int, str]) -> list[Picture]:
    order = sorted(names)
    latency: list[list[float | None]] = [[None] * len(order) for _ in order]
    bandwidth: list[list[float | None]] = [[None] * len(order) for _ in order]
    for link in links:
        i, j = order.index(link.a), order.index(link.b)
        latency[i][j] = latency[j][i] = link.latency * 1e6
        bandwidth[i][j] = bandwidth[j][i] = link.bandwidth / 1e6
    labels = [names[rank] for rank in order]
    return [
        Matrix("latency, µs (half a round trip)", labels, latency),
        Matrix("bandwidth, MB/s", labels, bandwidth),
    ]
