"""The network interfaces of a host, and which of them all hosts can use. Local: nothing is sent."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# linux/sockios.h and linux/if.h. struct ifreq is a name of 16 bytes and a union of 24.
_GET_ADDRESS, _GET_NETMASK, _GET_FLAGS = 0x8915, 0x891B, 0x8913
_IS_UP = 0x1


@dataclass(frozen=True)
class Interface:
    """An interface that is up and has an IPv4 address: eth0, 10.77.0.11, 24 (bits of the mask)."""

    name: str
    address: str
    bits: int

    @property
    def network(self) -> str:
        """The network that it is connected to, such as 10.77.0.0/24."""
        return str(ipaddress.ip_interface(f"{self.address}/{self.bits}").network)


@dataclass(frozen=True)
class Host:
    """What one host knows of its own network.

    Attributes:
        name: the host's own name, which gloo looks up.
        address: what it resolves to there; "" if to nothing.
        interfaces: those that are up, in the kernel's order.
        wanted: GLOO_SOCKET_IFNAME, "" if it is not set.
    """

    name: str
    address: str
    interfaces: tuple[Interface, ...]
    wanted: str = ""

    def named(self, name: str) -> Interface | None:
        """Return the interface of that name, None if there is none."""
        return next((it for it in self.interfaces if it.name == name), None)

    def has(self, address: str) -> bool:
        """Say whether an interface has that address."""
        return any(it.address == address for it in self.interfaces)

    def inside(self, network: str) -> Interface | None:
        """Return the first interface in that network, None if there is none."""
        return next((it for it in self.interfaces if it.network == network), None)


def of_this_host() -> tuple[Interface, ...]:
    """Return the interfaces that are up and have an IPv4 address. Local."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            # one without an IPv4 address says so by an error
            with contextlib.suppress(OSError):
                flags = fcntl.ioctl(probe, _GET_FLAGS, request)[16:18]
                address = fcntl.ioctl(probe, _GET_ADDRESS, request)[20:24]
                mask = fcntl.ioctl(probe, _GET_NETMASK, request)[20:24]
                if struct.unpack("H", flags)[0] & _IS_UP:
                    bits = int.from_bytes(mask, "big").bit_count()
                    found.append(Interface(name, socket.inet_ntoa(address), bits))
    return tuple(found)


def resolve(name: str) -> str:
    """Return the first address that a name resolves to on this host, "" if none. Local."""
    with contextlib.suppress(OSError):
        infos = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        return str(infos[0][4][0])
    return ""


def is_loopback(address: str) -> bool:
    """Say whether an address means the host that asks, 127.0.1.1 for one. Local."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def unfit(addresses: Sequence[str]) -> str:
    """Say why hosts cannot reach each other at these addresses, one a host; "" if they may. Local.

    Whether they do is another question, which `doors` asks.
    """
    if any(not address for address in addresses):
        return "there is none on some host"
    if any(is_loopback(address) for address in addresses):
        loopback = next(address for address in addresses if is_loopback(address))
        return f"{loopback} means every host itself"
    if len(set(addresses)) < len(addresses):
        twice = next(address for address in addresses if addresses.count(address) > 1)
        return f"{twice} is the address of several hosts"
    return ""


def common_networks(hosts: Sequence[Host]) -> list[str]:
    """Return the networks in which every host has an address of its own, best first. Local.

    The best is the one in which other hosts know a host by its name; then the root's order counts.
    """
    shared = []
    for network in _unique(it.network for it in hosts[0].interfaces):
        members = [host.inside(network) for host in hosts]
        if not unfit([it.address if it else "" for it in members]):
            shared.append(network)
    known = {host.address for host in hosts if host.address}
    return sorted(shared, key=lambda network: not _any_inside(known, network))


def addresses_for_others(hosts: Sequence[Host], node: int) -> list[str]:
    """Return the addresses at which other hosts may reach that of a node, best first. Local.

    Left out are those that mean another host there: loopback, and what several hosts have.
    """
    networks = common_networks(hosts)
    host = hosts[node]
    inside = [it.address for network in networks if (it := host.inside(network))]
    rest = [host.address, *(it.address for it in host.interfaces)]
    elsewhere = {it.address for other in hosts if other is not host for it in other.interfaces} | {
        other.address for other in hosts if other is not host
    }
    return [
        address
        for address in _unique([*inside, *rest])
        if address and not is_loopback(address) and address not in elsewhere
    ]


def _any_inside(addresses: Iterable[str], network: str) -> bool:
    return any(
        ipaddress.ip_address(address.partition("%")[0]) in ipaddress.ip_network(network)
        for address in addresses
    )


def _unique(items: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(items))
