"""Where ranks meet and over which network: the decisions, without a network."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path
from typing import Any, cast

import pytest

from lockstep import launcher
from lockstep.errors import DeviceError, RendezvousError
from lockstep.rendezvous import env, gloo, interfaces
from lockstep.rendezvous.agree import Trouble, combine, limited
from lockstep.rendezvous.doors import Target, knock, open_door
from lockstep.rendezvous.interfaces import Host, Interface
from lockstep.rendezvous.meet import Place, parse
from lockstep.world import World

LO = Interface("lo", "127.0.0.1", 8)
OWN_NAMES = "the address of each host's own name"
DOCKER = Interface("docker0", "172.17.0.1", 16)


def host(number: int, address: str = "", wanted: str = "", *more: Interface) -> Host:
    """Return a host with lo, eth0 in 10.77.0.0/24, and more."""
    own = f"10.77.0.{10 + number}"
    interfaces = (LO, *more, Interface("eth0", own, 24))
    return Host(f"node{number}", own if address == "eth0" else address, interfaces, wanted)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("tcp", Place("tcp")),
        ("tcp://10.0.0.1:29500", Place("tcp", host="10.0.0.1", port=29500)),
        ("tcp://[fe80::1]:29500", Place("tcp", host="fe80::1", port=29500)),
        ("env", Place("env")),
        ("env://", Place("env")),
        ("file:///shared/dir", Place("file", Path("/shared/dir"))),
        ("file!:///shared/a b?c", Place("file", Path("/shared/a b?c"), insist=True)),
    ],
)
def test_parse(text: str, place: Place) -> None:
    """Each spelling is read."""
    assert parse(text) == place


@pytest.mark.parametrize(
    "text", ["", "file://relative", "file:/one", "http://x", "tcp://x", "tcp://x:99999", "/a"]
)
def test_parse_refuses(text: str) -> None:
    """What cannot be read is named, with what could be."""
    trouble = parse(text)
    assert isinstance(trouble, Trouble)
    assert repr(text) in trouble.found
    assert "file:///" in trouble.needed


def test_gloos_own_choice_is_kept() -> None:
    """Names resolve to distinct addresses that are heard: nothing is set."""
    hosts = [host(n, "eth0") for n in (1, 2, 3)]
    chosen, failures = gloo.pick(hosts, [{}, {"10.77.0.11": ""}, {"10.77.0.11": ""}])
    assert chosen is not None
    assert (chosen.names, failures) == (("", "", ""), [])


@pytest.mark.parametrize(
    ("address", "more", "why"),
    [
        ("127.0.1.1", (), "127.0.1.1 means every host itself"),
        ("172.17.0.1", (DOCKER,), "172.17.0.1 is the address of several hosts"),
        ("", (), "on node1 that is none"),
        ("192.0.2.7", (), "on node1 that is 192.0.2.7, on no interface of it"),
    ],
)
def test_another_interface_is_found(address: str, more: tuple[Interface, ...], why: str) -> None:
    """Loopback, a name that resolves to nothing here, the same docker0 everywhere."""
    hosts = [host(n, address, "", *more) for n in (1, 2)]
    chosen, failures = gloo.pick(hosts, [{}, {}])
    assert chosen is not None
    assert chosen.names == ("eth0", "eth0")
    assert len(failures) == 1
    assert why in failures[0]


def test_interfaces_may_have_another_name_on_each_host() -> None:
    """The network counts, not the name."""
    hosts = [
        Host("a", "127.0.1.1", (LO, Interface("eth0", "10.0.0.1", 24))),
        Host("b", "127.0.1.1", (LO, Interface("ens3", "10.0.0.2", 24))),
    ]
    chosen, _ = gloo.pick(hosts, [{}, {}])
    assert chosen is not None
    assert chosen.names == ("eth0", "ens3")


def test_a_network_that_is_not_heard_is_left() -> None:
    """An address is right only if somebody has reached it."""
    eth1 = [Interface("eth1", f"10.99.0.{n}", 24) for n in (1, 2)]
    hosts = [host(n, it.address, "", it) for n, it in enumerate(eth1, 1)]
    heard = [{"10.99.0.2": "no answer in 4 s", "10.77.0.12": ""}, {"10.99.0.1": "no answer in 4 s"}]
    chosen, failures = gloo.pick(hosts, heard)
    assert chosen is not None
    assert chosen.names == ("eth0", "eth0")
    reason = "from node1 to 10.99.0.2: no answer in 4 s"
    assert failures == [f"{what}: {reason}" for what in (OWN_NAMES, "network 10.99.0.0/24")]


def test_what_the_user_asks_for_is_the_only_candidate() -> None:
    """GLOO_SOCKET_IFNAME of the root's host alone: the others take the same network."""
    hosts = [host(1, "eth0", "eth0", DOCKER), host(2, "eth0", "", DOCKER)]
    chosen, _ = gloo.pick(hosts, [{}, {}])
    assert chosen is not None
    assert chosen.names == ("eth0", "eth0")
    hosts = [host(1, "eth0", "docker0", DOCKER), host(2, "eth0", "", DOCKER)]
    chosen, failures = gloo.pick(hosts, [{}, {}])
    assert chosen is None
    assert "172.17.0.1 is the address of several hosts" in failures[0]


def test_nothing_fits() -> None:
    """No common network: no choice, and each candidate's reason."""
    hosts = [
        Host("a", "127.0.1.1", (LO, Interface("eth0", "10.0.0.1", 24))),
        Host("b", "127.0.1.1", (LO, Interface("eth0", "10.0.1.1", 24))),
    ]
    assert gloo.pick(hosts, [{}, {}]) == (
        None,
        [f"{OWN_NAMES}: 127.0.1.1 means every host itself"],
    )


def test_the_network_that_others_know_a_host_by_comes_first() -> None:
    """Two common networks: the one in which the names resolve is better."""
    eth1 = [Interface("eth1", f"10.99.0.{n}", 24) for n in (1, 2)]
    hosts = [host(n, "eth0", "", it) for n, it in enumerate(eth1, 1)]
    assert interfaces.common_networks(hosts) == ["10.77.0.0/24", "10.99.0.0/24"]
    assert interfaces.addresses_for_others(hosts, 0) == ["10.77.0.11", "10.99.0.1"]


def test_addresses_that_mean_another_host_there_are_left_out() -> None:
    """Neither loopback nor the docker0 that every host has is offered."""
    hosts = [host(n, "127.0.1.1", "", DOCKER) for n in (1, 2)]
    assert interfaces.addresses_for_others(hosts, 0) == ["10.77.0.11"]
    assert interfaces.addresses_for_others([host(1), Host("b", "", (LO,))], 0) == ["10.77.0.11"]


def test_interfaces_of_this_host() -> None:
    """lo is there, with its mask."""
    found = {it.name: it for it in interfaces.of_this_host()}
    assert found["lo"] == LO
    assert found["lo"].network == "127.0.0.0/8"


@pytest.mark.parametrize("at", ["", "0.0.0.0", "127.0.0.1"])
def test_knocking(at: str) -> None:
    """The right door answers with its number; another one, or none, is told apart."""
    door, other = open_door(0, at), open_door(0, at)
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            door.answer()
            other.answer()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        assert knock(Target("127.0.0.1", door.port, door.number)) == ""
        heard = knock(Target("127.0.0.1", other.port, door.number))
        assert heard == "another program answers there"
        elsewhere = knock(Target("127.0.0.2", door.port, door.number))
        assert elsewhere == ("" if at != "127.0.0.1" else "Connection refused")
        port = door.port
    finally:
        stop.set()
        thread.join()
        door.socket.close()
        other.socket.close()
    assert "refused" in knock(Target("127.0.0.1", port, door.number))


def test_a_door_at_a_port_that_is_taken() -> None:
    """It is an error, not another port."""
    with socket.create_server(("", 0)) as taken, pytest.raises(OSError, match="in use"):
        open_door(taken.getsockname()[1])


def test_variables_that_contradict_mpi() -> None:
    """Both numbers are named."""
    world = World(1, 4, 1, 2, 0, 2, "node1", cast("Any", None))
    assert env.contradiction(world, {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}) is None
    assert env.contradiction(world, {}) is None
    trouble = env.contradiction(world, {"RANK": "0", "WORLD_SIZE": "8"})
    assert trouble is not None
    assert "RANK=0 in the environment, but MPI says 1" in trouble.found
    assert "WORLD_SIZE=8 in the environment, but MPI says 4" in trouble.found


@pytest.mark.parametrize("port", ["0", "70000", "abc", "-1"])
def test_a_port_that_is_none(port: str) -> None:
    """MASTER_PORT has to be a port."""
    trouble = env.place({"MASTER_PORT": port})[2]
    assert trouble is not None
    assert port in trouble.found
    assert env.place({"MASTER_ADDR": "a", "MASTER_PORT": "29500"}) == ("a", 29500, None)


def test_one_error_for_all_ranks() -> None:
    """It names the ranks that are in trouble, each kind once."""
    missing, full = Trouble("no directory", "a", "b"), Trouble("no room", "c", "d")
    assert combine([("h1", None), ("h2", None)]) is None
    error = combine([("h1", None), ("h2", missing), ("h3", missing)])
    assert isinstance(error, RendezvousError)
    assert error.found == "rank 1 (h2), 2 (h3): no directory"
    error = combine([("h1", full), ("h2", missing)], DeviceError)
    assert isinstance(error, DeviceError)
    assert error.found == "rank 0 (h1): no room\nrank 1 (h2): no directory"
    error = combine([("h1", missing), ("h2", missing)])
    assert error is not None
    assert error.found == "all ranks: no directory"
    error = combine([("h0", None), *(("h", missing) for _ in range(100))])
    assert error is not None
    assert "and 94 more" in error.found


def test_the_name_of_a_job() -> None:
    """The batch system's, with the restart; one of our own launchers starts from a clean slate."""
    assert launcher.job_name({}) == "local"
    assert launcher.job_name({"SLURM_JOB_ID": "7"}) == "7"
    assert launcher.job_name({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}) == "7-restart2"
    assert launcher.job_name({"PBS_JOBID": "9.server"}) == "9.server"
    left = {"PMIX_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "HOME": "/h", "OMPI_MCA_btl": "tcp"}
    assert launcher.without_launch(left) == {"HOME": "/h", "OMPI_MCA_btl": "tcp"}


def test_limited() -> None:
    """A call that hangs is left; what a call returns or raises is passed on."""
    assert limited(lambda: 5, 5.0) == 5
    with pytest.raises(ZeroDivisionError):
        limited(lambda: 1 // 0, 5.0)
    release, start = threading.Event(), time.monotonic()
    with pytest.raises(TimeoutError):
        limited(release.wait, 0.1)
    assert time.monotonic() - start < 2.0
    release.set()
