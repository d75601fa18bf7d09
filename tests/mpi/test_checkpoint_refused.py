"""States that cannot be saved, or resumed; and what a checkpoint costs the training."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from mpi4py import MPI
from torch import nn

from disks import cannot_mount, small_disk
from lockstep import World
from lockstep.checkpoint import (
    Checkpoints,
    container,
    export,
    load_model,
)
from lockstep.checkpoint.folder import FORMAT
from lockstep.errors import CheckpointError, StorageError
from lockstep.waiting import wait_until
from stopping import paths


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
