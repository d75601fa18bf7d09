"""Where the ranks of a session meet: directories, locks, ports, the environment."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from pathlib import Path

import pytest
from mpi4py import MPI

import lockstep
from helpers import check_sum
from lockstep import World, rendezvous
from lockstep.errors import (
    RendezvousError,
)
from lockstep.rendezvous import directory, file, locks

LIMIT = timedelta(seconds=30)

pytestmark = pytest.mark.usefixtures("no_group")


@pytest.mark.ranks(2)
def test_a_directory_that_one_rank_does_not_have(world: World, shared: Path) -> None:
    """Missing, or another one than the root's: the rank is named on all ranks."""
    own = shared / f"of-{world.rank == 1}"
    if world.rank == 0:
        own.mkdir()
    with (
        pytest.raises(RendezvousError, match=r"rank 1 .*does not exist"),
        directory.fresh_place(world, own),
    ):
        pass
    assert not own.exists() or list(own.iterdir()) == []


@pytest.mark.ranks(2)
def test_another_directory_on_one_rank(
    world: World, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The root's mark is not there: the rank is named on all ranks, within the limit."""
    monkeypatch.setattr(directory, "VISIBLE", 1.0)
    own = shared / f"of-{world.rank == 1}"
    own.mkdir(exist_ok=True)
    world.comm.Barrier()
    with (
        pytest.raises(RendezvousError, match=r"rank 1 .*not the directory that the root sees"),
        directory.fresh_place(world, own),
    ):
        pass
    world.comm.Barrier()
    assert list(own.iterdir()) == []


@pytest.mark.ranks(2)
@pytest.mark.parametrize("fault", ["granted to all", "refused"])
def test_locks_that_do_not_hold(
    fault: str,
    world: World,
    shared: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Records are lost, or there are no locks: TCP is used, and the root says so."""

    def lock(handle: int, how: int) -> None:
        if fault == "refused":
            raise OSError(37, "No locks available")

    def slow_append(path: Path, rank: int, each: int) -> int:
        for i in range(each):
            with path.open("r+b") as opened:
                opened.seek(0, os.SEEK_END)
                both.wait(0.001)  # the other one may come in between, as on a slow file system
                opened.write(b"%08d:%04d\n" % (rank, i))
        return each

    both = threading.Event()
    monkeypatch.setattr(locks.fcntl, "flock", lock)
    if fault == "granted to all":
        monkeypatch.setattr(locks, "_append", slow_append)
        monkeypatch.setattr(locks, "_SETTLE", 0.5)
    url = f"file://{shared}"
    with lockstep.session(backend="gloo", rendezvous=url, timeout=LIMIT):
        check_sum(world)
    text = capfd.readouterr().err
    if world.rank == 0:
        assert f"locks do not hold across hosts in {shared}" in text
        assert ("No locks available" in text) == (fault == "refused")
        assert "rendezvous tcp://" in text
    with lockstep.session(backend="gloo", rendezvous=f"file!://{shared}", timeout=LIMIT):
        check_sum(world)
    assert ("as was asked for" in capfd.readouterr().err) == (world.rank == 0)


def test_locks_that_hold(world: World, shared: Path) -> None:
    """Every record is kept; a single rank has nobody to fear."""
    race = locks.race(world, shared)
    assert race.holds, race
    assert race.written == locks._MOST * min(world.size, 4)


def test_a_store_in_a_file(world: World, shared: Path) -> None:
    """What one rank writes, the others read."""
    store = file.open_in(world, shared, LIMIT, insist=False)
    assert store is not None
    store.set(f"from {world.rank}", "x")
    for rank in range(world.size):
        assert store.get(f"from {rank}") == b"x"


def test_the_environment_is_filled(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """MASTER_PORT is honoured; the rest is filled in, and restored at the end."""
    names = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    if world.rank == 0:
        monkeypatch.setenv("MASTER_ADDR", "localhost")
    with lockstep.session(backend="gloo", rendezvous="env", timeout=LIMIT):
        found = [os.environ[name] for name in names]
        assert found[0] == "localhost"
        assert int(found[1]) > 0
        assert found[2:] == [str(world.rank), str(world.size), str(world.local_rank)]
        check_sum(world)
    assert [os.environ.get(name) for name in names[1:]] == [None] * 4


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK"])
def test_an_environment_that_contradicts_mpi(
    name: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong on the last rank alone: an error on all, with both numbers."""
    if world.rank == world.size - 1:
        monkeypatch.setenv(name, "55")
    with (
        pytest.raises(RendezvousError, match=rf"{name}=55 in the environment, but MPI says \d"),
        lockstep.session(backend="gloo", rendezvous="env", timeout=LIMIT),
    ):
        pass


def test_a_port_that_is_taken(world: World, comm: MPI.Intracomm) -> None:
    """It is named, on all ranks."""
    with rendezvous.doors.open_door().socket as taken:
        port = comm.bcast(taken.getsockname()[1], root=0)
        with (
            pytest.raises(RendezvousError, match=f"TCP port {port} .*in use"),
            lockstep.session(backend="gloo", rendezvous=f"tcp://localhost:{port}", timeout=LIMIT),
        ):
            pass


def test_a_host_that_is_not_the_roots(world: World) -> None:
    """An address that cannot be reached, or looked up, is named with the reason."""
    with (
        pytest.raises(RendezvousError, match=r"cannot reach the root .*nowhere\.invalid"),
        lockstep.session(backend="gloo", rendezvous="tcp://nowhere.invalid:0", timeout=LIMIT),
    ):
        pass


def test_an_interface_that_is_not_there(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """GLOO_SOCKET_IFNAME is checked before gloo sees it, and otherwise kept."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    with (
        pytest.raises(RendezvousError, match=r"no interface nowhere0 .*there are .*lo"),
        lockstep.session(backend="gloo", timeout=LIMIT),
    ):
        pass
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with lockstep.session(backend="gloo", timeout=LIMIT):
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
        check_sum(world)
