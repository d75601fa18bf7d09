"""Sessions on one host: every backend and meeting point, right and wrong, on every rank."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI

import lockstep
from helpers import check_sum
from lockstep import World
from lockstep.errors import (
    CollectiveTimeout,
    DeviceError,
    LaunchError,
    RendezvousError,
    counted,
)

LIMIT = timedelta(seconds=30)
# Seconds in which an error has to be there, on a machine that others use as well.
SOON = 10.0

pytestmark = pytest.mark.usefixtures("no_group")


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


def test_ranks_of_one_node_listen_to_themselves(world: World) -> None:
    """No other host can reach the store or the watch; and nobody's name is asked for in the DNS."""
    before = _listening()
    world.comm.Barrier()
    with lockstep.session(backend="gloo", rendezvous="tcp", timeout=LIMIT, quiet=True):
        world.comm.Barrier()
        opened = _listening() - before
        assert world.rank or opened
        # 127.0.0.1, as it is written there
        assert {address for address, _ in opened} <= {"0100007F"}
        world.comm.Barrier()


def _listening() -> set[tuple[str, str]]:
    """Return address and inode of the sockets that this process listens at."""
    mine, found = set(), set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            mine.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in mine:
                found.add((words[1].partition(":")[0], words[9]))
    return found


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("name", "value"), [("LOCKSTEP_CHECK", "1"), ("LOCKSTEP_WATCHDOG", "off")])
def test_an_environment_that_one_rank_has(
    name: str, value: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of an mpirun that takes no variables to other hosts: an error on all ranks, no hang."""
    if world.rank == 1:
        monkeypatch.setenv(name, value)
    with (
        pytest.raises(LaunchError, match=rf"rank 1 \(.*\) for .*, {name}={value}") as caught,
        lockstep.session(backend="gloo", timeout=LIMIT),
    ):
        pass
    assert "mpirun -x" in str(caught.value)


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
