"""Save and resume on all ranks: bit for bit, at other numbers of ranks, and when the disk fails."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import nn
from torch.nn import functional as F

import lockstep
from disks import cannot_mount, small_disk
from lockstep import World
from lockstep.checkpoint import (
    Checkpoints,
    container,
    export,
    load_model,
    load_optimizer,
    restore_random,
)
from lockstep.checkpoint.folder import FORMAT
from lockstep.errors import CheckpointError, SettingsError, StorageError, counted
from lockstep.sgd import synchronous
from lockstep.waiting import wait_until


@pytest.fixture
def shared(tmp_path: Path, comm: MPI.Intracomm) -> Path:
    """Return one directory for all ranks."""
    return comm.bcast(tmp_path, root=0)


def paths(directory: Path) -> list[Path]:
    """Return the checkpoints of a directory, the oldest first."""
    return sorted(directory.glob("*.pt"))


class Training:
    """A small network with dropout, in step on all ranks, that can be stopped after any step."""

    def __init__(self, world: World) -> None:
        torch.manual_seed(5)
        self.world = world
        self.model = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3)
        )
        adam = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(adam, 0.05, total_steps=40)
        self.sgd = synchronous(adam, world, model=self.model)
        self.steps = 0
        self.begin_random_numbers(100 + world.rank)

    @staticmethod
    def begin_random_numbers(seed: int) -> None:
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)

    def step(self) -> None:
        """Take one step on data that all three sources of random numbers decide."""
        x = torch.rand(8, 6) + float(np.random.rand()) + random.random()
        y = torch.randint(3, (8,))
        self.sgd.zero_grad()
        self.sgd.backward(F.cross_entropy(self.model(x), y), examples=len(x))
        self.sgd.step()
        self.schedule.step()
        self.steps += 1

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.sgd.state_dict(),
            "schedule": self.schedule.state_dict(),
            "steps": self.steps,
        }

    def resume(self, state: dict[str, Any]) -> None:
        load_model(self.model, state["model"])
        load_optimizer(self.sgd, state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.steps = state["steps"]
        restore_random(state["random"])

    def weights(self) -> list[torch.Tensor]:
        return [tensor.clone() for tensor in self.model.state_dict().values()]


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("stop", [1, 6, 11])
def test_stop_and_resume_is_the_unbroken_run(
    world: World, shared: Path, stop: int, asynchronous: bool
) -> None:
    """Every bit of every weight and statistic, on every rank."""
    whole = Training(world)
    for _ in range(12):
        whole.step()
    first = Training(world)
    with Checkpoints(world, shared / "c", asynchronous=asynchronous) as checkpoints:
        assert checkpoints.resume() is None
        for _ in range(stop):
            first.step()
        checkpoints.save(stop, first.state())
        for _ in range(3):  # what is saved is a copy: these steps leave no trace
            first.step()
    second = Training(world)
    second.begin_random_numbers(7)
    with Checkpoints(world, shared / "c") as checkpoints:
        state = checkpoints.resume()
        assert state is not None
        assert state["steps"] == stop
        second.resume(state)
        for _ in range(12 - stop):
            second.step()
    for found, expected in zip(second.weights(), whole.weights(), strict=True):
        assert torch.equal(found, expected)


@pytest.fixture(scope="module")
def worlds(comm: MPI.Intracomm) -> dict[int, World]:
    """Return, by its size, a world of the first ranks, for those that are in it."""
    found = {}
    for size in range(1, comm.size + 1):
        part = comm.Split(0 if comm.rank < size else MPI.UNDEFINED, comm.rank)
        if part != MPI.COMM_NULL:
            found[size] = lockstep.discover(part)
    return found


@pytest.mark.parametrize("now", [1, 2, 3])
@pytest.mark.parametrize("then", [1, 2, 3])
def test_resume_on_another_number_of_ranks(
    worlds: dict[int, World],
    shared: Path,
    then: int,
    now: int,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The state is the same; ranks that have random numbers keep theirs, others start their own."""
    world = lockstep.discover()
    if max(then, now) > world.size:
        pytest.skip(f"needs {max(then, now)} ranks")
    if then in worlds:
        Training.begin_random_numbers(50 + world.rank)
        with Checkpoints(worlds[then], shared / "c") as checkpoints:
            state = {"w": torch.arange(4.0), "global_batch": 8 * then}
            checkpoints.save(3, state, own={"rank": world.rank})
    world.comm.Barrier()
    capfd.readouterr()
    drawn = None
    if now in worlds:
        with Checkpoints(worlds[now], shared / "c") as checkpoints:
            found = checkpoints.resume()
        assert found is not None
        assert found["w"].tolist() == [0.0, 1.0, 2.0, 3.0]
        assert (found["saved_ranks"], found["global_batch"]) == (then, 8 * then)
        assert found["own"] == ({"rank": world.rank} if world.rank < then else None)
        restore_random(found["random"])
        drawn = torch.rand(3).tolist()
        Training.begin_random_numbers(50 + world.rank)
        assert (drawn == torch.rand(3).tolist()) == (world.rank < then)
    everyone = [numbers for numbers in world.comm.allgather(drawn) if numbers is not None]
    assert len({tuple(numbers) for numbers in everyone}) == now
    said = f"saved by {counted(then, 'rank')}, resumed on {now}" in capfd.readouterr().out
    assert said == (world.rank == 0 and then != now)


def test_the_step_and_the_clock_say_when(world: World, shared: Path) -> None:
    """Every so many steps on all ranks; every so many minutes on the root's clock alone."""
    with Checkpoints(world, shared / "a", every_steps=4) as checkpoints:
        assert [step for step in range(1, 13) if checkpoints.due(step)] == [4, 8, 12]
    with Checkpoints(world, shared / "b", every_minutes=1e-9) as checkpoints:
        assert checkpoints.due(1) == (world.rank == 0)
    with Checkpoints(world, shared / "c", every_minutes=60.0) as checkpoints:
        assert not checkpoints.due(1)
    with pytest.raises(SettingsError, match="every_minutes=nan"):
        Checkpoints(world, shared / "d", every_minutes=float("nan"))


def test_what_is_resumed(world: World, shared: Path, comm: MPI.Intracomm) -> None:
    """Nothing, the newest, a file, the newest of another directory; what is not there."""
    with Checkpoints(world, shared / "a") as checkpoints:
        assert checkpoints.resume() is None
        for step in (1, 2):
            checkpoints.save(step, {"step": step})
        checkpoints.wait()
        first, second = paths(shared / "a")
        assert checkpoints.resume("none") is None
        assert checkpoints.resume("auto")["step"] == 2  # type: ignore[index]
        assert checkpoints.resume(str(first))["step"] == 1  # type: ignore[index]
    with Checkpoints(world, shared / "b") as checkpoints:
        found = checkpoints.resume(str(shared / "a"))
        assert found is not None
        assert found["step"] == 2
        assert set(found) == {"step", "random", "own", "saved_ranks", "source"}
        with pytest.raises(CheckpointError, match="there is no checkpoint in"):
            checkpoints.resume(str(shared / "b"))
        with pytest.raises(StorageError, match="No such file"):
            checkpoints.resume(str(shared / "c.pt"))
        comm.Barrier()
        if world.rank == 0:
            second.write_bytes(second.read_bytes()[:-1])
        with pytest.raises(CheckpointError, match="cut off"):
            checkpoints.resume(str(second))
        assert checkpoints.resume(str(shared / "a"))["step"] == 1  # type: ignore[index]


def test_two_jobs_in_one_directory(world: World, shared: Path) -> None:
    """The second is refused on all ranks, and told whose it is; later it may."""
    with Checkpoints(world, shared / "c") as first:
        with pytest.raises(StorageError, match="is in use by process"):
            Checkpoints(world, shared / "c")
        first.save(1, {})
    with Checkpoints(world, shared / "c") as second:
        assert second.resume() is not None


def test_a_state_that_cannot_be_read_back(world: World, shared: Path) -> None:
    """Refused on all ranks when it is saved, not when it is needed; training can go on."""
    with Checkpoints(world, shared / "c") as checkpoints:
        with pytest.raises(CheckpointError, match=r"state\.f is of type"):
            checkpoints.save(1, {"f": print})
        last = world.size - 1
        with pytest.raises(CheckpointError, match=r"own\.f is of type"):
            checkpoints.save(1, {}, own={"f": print if world.rank == last else 1})
        checkpoints.save(2, {"f": 1})
    assert len(paths(shared / "c")) == 1


def test_the_directory_cannot_be_made(world: World, shared: Path, comm: MPI.Intracomm) -> None:
    """One error on all ranks."""
    if world.rank == 0:
        (shared / "file").write_text("mine")
    comm.Barrier()
    with pytest.raises(StorageError, match="file"):
        Checkpoints(world, shared / "file" / "c")
    assert (shared / "file").read_text() == "mine"


@pytest.mark.parametrize(
    "odd", [{}, {"random": [], "own": [], "state": {}}, {"random": [{}], "own": [None], "state": 1}]
)
def test_no_state_of_a_training(world: World, shared: Path, odd: dict[str, Any]) -> None:
    """Whole, but of another program: an error on all ranks."""
    path = shared / "odd.pt"
    if world.rank == 0:
        with path.open("wb") as file:
            container.write(file, {"format": FORMAT, "step": 1, **odd})
    with Checkpoints(world, shared / "c") as checkpoints:
        with pytest.raises(CheckpointError, match="no state of a training"):
            checkpoints.resume(str(path))
        assert checkpoints.resume() is None


def test_another_model(world: World, shared: Path) -> None:
    """The same error on all ranks; neither model nor checkpoint has changed."""
    with Checkpoints(world, shared / "c") as checkpoints:
        checkpoints.save(1, {"model": nn.Linear(3, 4).state_dict()})
        checkpoints.wait()
        before = paths(shared / "c")[0].read_bytes()
        state = checkpoints.resume()
        assert state is not None
        with pytest.raises(CheckpointError, match=r"weight is float32 \[4, 3\]"):
            load_model(nn.Linear(3, 5), state["model"])
    assert paths(shared / "c")[0].read_bytes() == before


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_full_disk(world: World, shared: Path, comm: MPI.Intracomm, asynchronous: bool) -> None:
    """The next save is the same error on all ranks, and due at once; the older ones stay."""
    if reason := comm.bcast(cannot_mount(), root=0):
        pytest.skip(reason)
    if world.rank:
        comm.Barrier()
        _fill(world, shared / "disk", comm, asynchronous)
        comm.Barrier()
        return
    with small_disk(shared / "disk", 1024) as disk:
        comm.Barrier()
        _fill(world, disk, comm, asynchronous)
        comm.Barrier()


def _fill(world: World, disk: Path, comm: MPI.Intracomm, asynchronous: bool) -> None:
    state = {"w": torch.ones(100_000)}
    with Checkpoints(world, disk / "c", asynchronous=asynchronous) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        if asynchronous:
            checkpoints.save(2, {**state, "more": torch.ones(200_000)})
            due = wait_until(lambda: checkpoints.due(2), 0.0 if world.rank else 20.0)
            assert due == (world.rank == 0)
            with pytest.raises(StorageError, match="No space left"):
                checkpoints.save(3, state)
        else:
            with pytest.raises(StorageError, match="No space left"):
                checkpoints.save(2, {**state, "more": torch.ones(200_000)})
        assert not checkpoints.due(3)
        found = checkpoints.resume()
        assert found is not None
        assert found["w"].shape == (100_000,)
        with pytest.raises(StorageError, match="No space left"):
            export(nn.Linear(700, 700), disk / "model.safetensors", world)
    comm.Barrier()
    assert len(list((disk / "c").iterdir())) == 2  # the lock and the older one


def test_training_waits_for_the_copy_only(
    world: World, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the disk takes its time, save has returned; what is changed then is not saved."""
    go_on = threading.Event()

    def slow(file: BinaryIO, content: dict[str, Any]) -> None:
        assert go_on.wait(30.0)
        write(file, content)

    write = container.write
    monkeypatch.setattr(container, "write", slow)
    weights = torch.ones(5)
    with Checkpoints(world, shared / "c") as checkpoints:
        checkpoints.save(1, {"w": weights})
        assert not paths(shared / "c")
        weights.zero_()
        go_on.set()
        checkpoints.wait()
        found = checkpoints.resume()
    assert found is not None
    assert found["w"].tolist() == [1.0] * 5
