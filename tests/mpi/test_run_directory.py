"""A run directory that is kept over restarts, and the logbook that fills it, on all ranks."""

from __future__ import annotations

import csv
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI

from disks import cannot_mount, small_disk
from lockstep import World
from lockstep.errors import CollectiveTimeout, SettingsError, StorageError
from lockstep.logbook import Logbook
from lockstep.metrics import RunDirectory, current, read
from lockstep.together import on_all


@dataclass(frozen=True)
class Settings:
    """Of a job."""

    width: int = 4


@pytest.fixture
def shared(tmp_path: Path, comm: MPI.Intracomm) -> Path:
    """Return one directory for all ranks."""
    return comm.bcast(tmp_path, root=0)


def opened(world: World, path: Path, **more: Any) -> RunDirectory:
    """Open exactly this directory."""
    return RunDirectory(world, Path("unused"), "job", Settings(), {}, exact=path, **more)


def rows(path: Path) -> list[dict[str, str]]:
    """Return what results.csv holds."""
    with (path / "results.csv").open() as file:
        return list(csv.DictReader(file))


def test_the_same_directory_over_restarts(world: World, shared: Path, comm: MPI.Intracomm) -> None:
    """Appended to, nothing overwritten; of an epoch that was done twice, the last one counts."""
    path = shared / "a" / "run"
    first = opened(world, path)
    assert first.path == path
    for epoch in (1, 2):
        first.record("epoch", epoch=epoch, loss=1.0, acc=50.0, global_step=10 * epoch)
    first.leave()
    comm.Barrier()
    assert [row["loss"] for row in rows(path)] == ["1.0", "1.0"]
    comm.Barrier()
    second = opened(world, path)
    second.resumed(15)
    second.record("epoch", epoch=2, loss=2.0, acc=60.0, global_step=20)
    comm.Barrier()
    assert [row["loss"] for row in rows(path)] == ["1.0", "2.0"]
    assert list(rows(path)[0]) == ["epoch", "loss", "acc"]
    second.finish()
    comm.Barrier()
    names = {"settings.json", "settings-2.json", "metrics.jsonl", "results.csv", "curves.png"}
    assert {it.name for it in path.iterdir()} == names | {"DONE", ".lock"}
    assert [it["kind"] for it in read(path / "metrics.jsonl")] == [
        "epoch",
        "epoch",
        "start",
        "epoch",
    ]
    assert json.loads((path / "settings-2.json").read_text())["ranks"] == world.size


def test_a_restart_without_a_checkpoint(world: World, shared: Path, comm: MPI.Intracomm) -> None:
    """What was measured before is superseded, not lost."""
    for _ in range(2):
        run = opened(world, shared / "run")
        run.record("step", global_step=1, loss=1.0)
        run.leave()
        comm.Barrier()
    found = read(shared / "run" / "metrics.jsonl")
    assert [it["kind"] for it in found] == ["step", "start", "step"]
    assert [it["kind"] for it in current(found)] == ["start", "step"]


def test_a_run_that_is_done(world: World, shared: Path, comm: MPI.Intracomm) -> None:
    """A second start is refused on all ranks and overwrites nothing; it can be asked for."""
    assert not RunDirectory.is_done(world, shared / "run")
    opened(world, shared / "run").finish()
    assert RunDirectory.is_done(world, shared / "run")
    before = sorted(shared.rglob("*"))
    comm.Barrier()
    with pytest.raises(SettingsError, match="DONE is there"):
        opened(world, shared / "run")
    assert sorted(shared.rglob("*")) == before


def test_files_of_others(world: World, shared: Path, comm: MPI.Intracomm) -> None:
    """A directory with results that no run has made is refused; other files do not matter."""
    path = shared / "run"
    if world.rank == 0:
        path.mkdir()
        (path / "slurm-1.out").write_text("log")
        (path / "results.csv").write_text("mine")
    comm.Barrier()
    with pytest.raises(SettingsError, match=r"results\.csv, but no settings\.json"):
        opened(world, path)
    assert (path / "results.csv").read_text() == "mine"
    comm.Barrier()
    if world.rank == 0:
        (path / "results.csv").unlink()
    comm.Barrier()
    opened(world, path).finish()
    assert (path / "slurm-1.out").read_text() == "log"


def test_two_jobs_at_once(world: World, shared: Path) -> None:
    """The second is refused on all ranks, and told whose the directory is."""
    first = opened(world, shared / "run")
    with pytest.raises(StorageError, match="is in use by process"):
        opened(world, shared / "run")
    first.leave()
    opened(world, shared / "run").leave()


def test_it_cannot_be_made(world: World, shared: Path, comm: MPI.Intracomm) -> None:
    """One error on all ranks."""
    if world.rank == 0:
        (shared / "file").write_text("mine")
    comm.Barrier()
    with pytest.raises(StorageError, match="make the run directory"):
        opened(world, shared / "file" / "run")


def test_a_full_disk(world: World, shared: Path, comm: MPI.Intracomm) -> None:
    """What fails on the root is raised on all ranks; DONE is not written."""
    if reason := comm.bcast(cannot_mount(), root=0):
        pytest.skip(reason)

    def fill(disk: Path) -> None:
        comm.Barrier()
        run = opened(world, disk / "run")
        for number in range(2000):
            run.record("step", global_step=number, text="x" * 50)
        with pytest.raises(StorageError, match="No space left"):
            run.check()
        with pytest.raises(StorageError, match="No space left"):
            run.finish()
        assert not (disk / "run" / "DONE").exists()
        comm.Barrier()

    if world.rank:
        fill(shared / "disk")
        return
    with small_disk(shared / "disk", 64) as disk:
        fill(disk)


def train(
    log: Logbook, world: World, first: int, last: int, sums: list[float] | None = None
) -> None:
    """Note the steps first + 1 to last of an epoch of 4, whose losses are 1, 2, 3 and so on."""
    log.start_epoch(1, done=first, sums=sums)
    for number in range(first + 1, last + 1):
        images = 2 + world.rank
        total = sum(2 + rank for rank in range(world.size))
        loss = torch.tensor(float(number + world.rank))
        log.step(epoch=1, number=number, global_step=number, loss=loss, images=images, total=total)


def test_a_logbook(
    world: World, shared: Path, comm: MPI.Intracomm, capfd: pytest.CaptureFixture[str]
) -> None:
    """Lines by the root, records, and the exact mean loss of an epoch that was cut off."""
    run = opened(world, shared / "run")
    with Logbook(world, run, epochs=1, steps=4, interval=2) as log:
        train(log, world, 0, 3)
        sums = log.sums()
        log.leave("asked to leave")
    run = opened(world, shared / "run")
    with Logbook(world, run, epochs=1, steps=4, interval=2) as log:
        log.resumed(3, seconds=100.0)
        train(log, world, 3, 4, sums)
        log.epoch(1, 4, 91.25, 0.5, learning_rate=0.1)
        assert log.seconds > 100.0
        log.end({"divergence between ranks": 0.0})
    comm.Barrier()
    images = [2 + rank for rank in range(world.size)]
    weighted = sum(n * (2.5 + rank) for rank, n in enumerate(images)) / sum(images)
    (row,) = rows(shared / "run")
    assert float(row["loss"]) == weighted
    assert list(row)[:3] == ["epoch", "loss", "acc"]
    assert (row["acc"], row["test_loss"], row["learning_rate"]) == ("91.25", "0.5", "0.1")
    found = read(shared / "run" / "metrics.jsonl")
    steps = [it for it in current(found) if it["kind"] == "step"]
    assert [it["step"] for it in steps] == [2, 4]
    assert all(it["images_per_second"] > 0 and it["time"] > 1.6e9 for it in steps)
    assert (shared / "run" / "DONE").exists()
    text = capfd.readouterr().out
    assert ("rank 0 epoch 1 step 2/4 loss 2.0000 " in text) == (world.rank == 0)
    assert ("test accuracy 91.25 %" in text) == (world.rank == 0)
    assert (world.rank == 0) == bool(text)


def test_a_rank_without_images(world: World, shared: Path, comm: MPI.Intracomm) -> None:
    """Its loss is not looked at, and counts nothing."""
    run = opened(world, shared / "run")
    with Logbook(world, run, epochs=1, steps=1) as log:
        log.start_epoch(1)
        n = 0 if world.rank else 3
        loss = torch.tensor(float("nan") if world.rank else 2.0)
        log.step(epoch=1, number=1, global_step=1, loss=loss, images=n, total=3)
        log.epoch(1, 1, 50.0, 1.0)
        log.leave("")
    comm.Barrier()
    assert float(rows(shared / "run")[0]["loss"]) == 2.0


@pytest.mark.ranks(2)
def test_a_rank_that_is_late(world: World, shared: Path) -> None:
    """The others wait for as long as was said, and no longer."""
    run = opened(world, shared / "run", timeout=0.5)
    begin, late = time.monotonic(), world.rank == world.size - 1
    if late:
        time.sleep(2.0)
        run.check()
    else:
        with pytest.raises(CollectiveTimeout, match="look at the run directory"):
            run.check()
        assert time.monotonic() - begin < 1.9
        world.comm.allgather((world.host, None))  # where the late one waits for them
    run.leave()


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), MemoryError("no room")])
def test_what_the_system_refuses_is_an_error_on_all(world: World, error: Exception) -> None:
    """On the last rank alone; the others learn of it."""

    def action() -> None:
        if world.rank == world.size - 1:
            raise error

    with pytest.raises(StorageError, match=f"cannot look: {type(error).__name__}"):
        on_all(world, action, "look")


def test_a_name_at_which_nobody_can_look(world: World, shared: Path) -> None:
    """The system refuses even to say what it is."""
    with pytest.raises(StorageError, match="cannot make the run directory"):
        opened(world, shared / ("x" * 300))


def test_no_room_for_tensorboard(world: World, shared: Path) -> None:
    """A file has the name of its directory: an error on all ranks, before and after a restart."""
    pytest.importorskip("torch.utils.tensorboard")
    path = shared / "run"
    for again in (False, True):
        if world.rank == 0:
            path.mkdir(exist_ok=True)
            (path / "tensorboard").write_text("mine")
        run = opened(world, path, tensorboard=True)
        if again:
            run.resumed(3)
        run.record("step", global_step=4, loss=1.0)
        with pytest.raises(StorageError, match=r"cannot write .*tensorboard"):
            run.leave()
        if run._lock is not None:
            run._lock.release()
    assert (path / "tensorboard").read_text() == "mine"
