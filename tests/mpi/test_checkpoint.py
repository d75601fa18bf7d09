"""Save and resume on all ranks: bit for bit, at other numbers of ranks, and when the disk fails."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mpi4py import MPI

import lockstep
from lockstep import World
from lockstep.checkpoint import (
    Checkpoints,
    restore_random,
)
from lockstep.errors import CheckpointError, SettingsError, StorageError, counted
from stopping import Training, paths


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
