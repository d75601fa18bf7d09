"""Sessions on one host: every backend and meeting point, right and wrong, on every rank."""

from __future__ import annotations

import os
import stat
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI

import lockstep
from lockstep import World, rendezvous
from lockstep.errors import (
    CollectiveTimeout,
    DeviceError,
    LaunchError,
    RendezvousError,
    counted,
)
from lockstep.rendezvous import directory, file, locks

LIMIT = timedelta(seconds=30)
# Seconds in which an error has to be there, on a machine that others use as well.
SOON = 10.0

pytestmark = pytest.mark.usefixtures("no_group")


@pytest.fixture
def shared(comm: MPI.Intracomm, tmp_path: Path) -> Path:
    """Return one directory that all ranks see."""
    return Path(comm.bcast(str(tmp_path), root=0))


def check_sum(world: World) -> None:
    """See that the ranks of the session are those of the world."""
    assert (dist.get_rank(), dist.get_world_size()) == (world.rank, world.size)
    tensor = torch.full((3,), float(world.rank + 1))
    dist.all_reduce(tensor)
    assert tensor.tolist() == [world.size * (world.size + 1) / 2] * 3


@pytest.mark.parametrize("meeting", [None, "tcp", "env", "file"])
@pytest.mark.parametrize("backend", ["gloo", "cpu:mpi", "cpu:gloo", "mpi"])
def test_opens_and_closes(backend: str, meeting: str | None, shared: Path) -> None:
    """Twice in a row; nothing is left, neither in the directory nor in the environment."""
    before = dict(os.environ)
    url = f"file://{shared}" if meeting == "file" else meeting
    for _ in range(2):
        with lockstep.session(backend=backend, rendezvous=url, timeout=LIMIT) as world:
            check_sum(world)
        assert not dist.is_initialized()
    assert dict(os.environ) == before
    world.comm.Barrier()
    assert list(shared.iterdir()) == []


def test_the_root_says_what_was_opened(capfd: pytest.CaptureFixture[str]) -> None:
    """One line on the root, none elsewhere; none if it is to be quiet."""
    with lockstep.session(backend="gloo", timeout=LIMIT) as world:
        pass
    text = capfd.readouterr().err
    ranks = counted(world.size, "rank")
    wanted = f"{ranks} on 1 node, {counted(torch.get_num_threads(), 'thread')} a rank, cpu\n"
    lines = [line for line in text.splitlines() if line.startswith("lockstep: ")]
    assert len(lines) == (world.rank == 0)
    assert (wanted in text) == (world.rank == 0)
    with lockstep.session(backend="gloo", timeout=LIMIT, quiet=True):
        pass
    assert "lockstep: " not in capfd.readouterr().err


def test_the_file_is_the_owners_alone(shared: Path) -> None:
    """While the session is open there is one fresh place, which nobody else may enter."""
    shared.joinpath("store").touch()
    with lockstep.session(backend="gloo", rendezvous=f"file://{shared}", timeout=LIMIT) as world:
        places = [path for path in shared.iterdir() if path.name != "store"]
        assert len(places) == 1
        assert stat.S_IMODE(places[0].stat().st_mode) == 0o700
        assert stat.S_IMODE((places[0] / "store").stat().st_mode) == 0o600
        world.comm.Barrier()


@pytest.mark.parametrize("backend", ["mpi", "gloo"])
def test_an_exception_on_all_ranks(backend: str, shared: Path) -> None:
    """It comes through, everything is closed, and the next session opens."""
    with (
        pytest.raises(KeyError, match="mine"),
        lockstep.session(backend=backend, rendezvous=f"file://{shared}", timeout=LIMIT),
    ):
        raise KeyError("mine")
    assert not dist.is_initialized()
    with lockstep.session(backend=backend, rendezvous=f"file://{shared}", timeout=LIMIT) as world:
        check_sum(world)
    world.comm.Barrier()
    assert list(shared.iterdir()) == []


def fail_after(comm: MPI.Intracomm) -> None:
    """Wait for the other ranks, then fail."""
    comm.Barrier()
    raise ZeroDivisionError


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", ["mpi", "gloo"])
def test_an_exception_on_one_rank_waits_for_nobody(
    backend: str, shared: Path, world: World, comm: MPI.Intracomm
) -> None:
    """The others have not come to the end; the one that raises is out, and its file is gone."""
    start = time.monotonic()
    url = f"file://{shared}"
    if world.rank == 1:
        with (
            pytest.raises(KeyError),
            lockstep.session(backend=backend, rendezvous=url, timeout=LIMIT),
        ):
            raise KeyError("mine")
        assert time.monotonic() - start < SOON
        assert list(shared.iterdir()) == []
        comm.Barrier()
    else:
        with (
            pytest.raises(ZeroDivisionError),
            lockstep.session(backend=backend, rendezvous=url, timeout=LIMIT),
        ):
            fail_after(comm)


@pytest.mark.ranks(2)
def test_a_rank_that_does_not_come_is_named(world: World, comm: MPI.Intracomm) -> None:
    """Those that wait for it learn which."""
    last = world.size - 1
    if world.rank != last:
        with (
            pytest.raises(CollectiveTimeout, match=rf"rank {last} to open the session"),
            lockstep.session(backend="gloo", timeout=timedelta(seconds=1)),
        ):
            pass
    comm.Barrier()


@pytest.mark.parametrize(
    ("asked", "kind", "text"),
    [
        ({"backend": "foo"}, LaunchError, "no foo"),
        ({"backend": "cpu:"}, LaunchError, "without a name"),
        ({"backend": "gloo", "rendezvous": "http://x"}, LaunchError, "http://x"),
        ({"world_size": 77}, LaunchError, "77 ranks was asked for, but MPI has"),
        ({"backend": "gloo", "rendezvous": "file:///no/such/place"}, RendezvousError, "not exist"),
        ({"backend": "gloo", "rendezvous": "file:///dev/null"}, RendezvousError, "is a file"),
    ],
)
def test_what_cannot_be_opened(asked: dict[str, str], kind: type[Exception], text: str) -> None:
    """The same error on all ranks, soon; the next session opens."""
    start = time.monotonic()
    with pytest.raises(kind, match=text), lockstep.session(**asked):  # type: ignore[arg-type]
        pass
    assert time.monotonic() - start < SOON
    with lockstep.session(timeout=LIMIT) as world:
        check_sum(world)


@pytest.mark.ranks(2)
def test_ranks_that_ask_for_different_sessions(world: World) -> None:
    """They are told apart before any of them waits."""
    backend = "gloo" if world.rank == 1 else "mpi"
    with (
        pytest.raises(LaunchError, match=r"rank 0 for backend='mpi'.*rank 1 .* for backend='gloo'"),
        lockstep.session(backend=backend, timeout=LIMIT),
    ):
        pass


def test_a_session_inside_of_a_session() -> None:
    """It is refused, and the outer one goes on."""
    with lockstep.session(backend="gloo", timeout=LIMIT) as world:
        with (
            pytest.raises(LaunchError, match="open already"),
            lockstep.session(backend="gloo", timeout=LIMIT),
        ):
            pass
        check_sum(world)


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


def test_device(world: World) -> None:
    """Without a GPU auto is the CPU, and cuda an error on all ranks; so is another word."""
    assert lockstep.device(world, "cpu") == torch.device("cpu")
    with pytest.raises(DeviceError, match="device 'tpu'"):
        lockstep.device(world, "tpu")
    if torch.cuda.device_count() >= world.size:
        assert lockstep.device(world, "auto").type == "cuda"
        return
    assert lockstep.device(world, "auto") == torch.device("cpu")
    for attempt in (lambda: lockstep.device(world, "cuda"), _open_nccl):
        with pytest.raises(DeviceError, match="GPU"):
            attempt()


def _open_nccl() -> None:
    with lockstep.session(backend="nccl" if dist.is_nccl_available() else "gloo", timeout=LIMIT):
        raise DeviceError("no GPU was missed")
