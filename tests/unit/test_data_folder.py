"""Pictures decoded batch by batch, by processes that know nothing of the job."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.data import Folder, Images, batches, in_order
from lockstep.data.decode import decode
from lockstep.data.folder import Files
from lockstep.errors import DataError
from lockstep.waiting import wait_until
from lockstep.world import World

MEAN, DEVIATION = (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)
N = 23


def world(rank: int = 0, size: int = 1) -> World:
    """Return a world without anybody to talk to."""
    return World(rank, size, rank, size, 0, 1, "host", None)  # type: ignore[arg-type]


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    """Return image files, one with a name that is no text."""
    random, made = np.random.default_rng(1), []
    for number in range(N):
        name = f"{number:02}.png" if number != 5 else os.fsdecode(b"05\xff.png")
        made.append(str(tmp_path / name))
        image = Image.fromarray(random.integers(256, size=(8, 8, 3), dtype=np.uint8))
        image.save(made[-1])
    return made


@pytest.fixture
def started() -> Iterator[None]:
    """See to it that no process of the test is left."""
    yield
    gc.collect()
    assert wait_until(lambda: not multiprocessing.active_children(), 60.0)


def folder(paths: list[str], workers: int) -> Folder:
    """Return the set of some files."""
    labels = torch.arange(len(paths)) % 3
    return Folder(Files(paths, 8), labels, MEAN, DEVIATION, ("a", "b", "c"), workers)


def kept(paths: list[str]) -> Images:
    """Return the same set in memory."""
    pixels = torch.stack([decode(path, 8) for path in paths])
    return Images(pixels, torch.arange(len(paths)) % 3, MEAN, DEVIATION, ("a", "b", "c"))


def same(one: Folder, other: Images, seed: int, rank: int = 0, size: int = 1) -> None:
    """Compare an epoch, and a test."""
    for shards in (
        lambda: batches(N, 5, world(rank, size), seed, 1),
        lambda: in_order(N, 4, world(rank, size)),
    ):
        pairs = zip(one.take(shards()), other.take(shards()), strict=True)
        for (batch, x, y), (expected, x_there, y_there) in pairs:
            assert torch.equal(batch.indices, expected.indices)
            assert batch.total == expected.total
            assert torch.equal(x, x_there)
            assert torch.equal(y, y_there)


def test_files_keep_their_names(paths: list[str]) -> None:
    """Also those that are no text."""
    files = Files(paths, 8)
    assert [files.path(i) for i in range(len(files))] == paths


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_batches_are_those_of_a_set_in_memory(
    paths: list[str], layout: torch.memory_format
) -> None:
    """Without processes: images, labels, scale and format; a rank may have none in the last."""
    cpu = torch.device("cpu")
    one, other = folder(paths, 0).to(cpu, layout), kept(paths).to(cpu, layout)
    for rank, size in ((0, 1), (2, 3), (6, 7)):
        same(one, other, 1, rank, size)
    _, x, _ = next(one.take(batches(N, 5, world(), 1, 1)))
    assert x.is_contiguous(memory_format=layout)


def test_processes_decode(paths: list[str], started: None) -> None:
    """The same batches in the same order, epoch after epoch, also after one that was left early."""
    state = torch.get_rng_state()
    one, other = folder(paths, 2), kept(paths)
    same(one, other, 1)
    workers = {process.pid for process in multiprocessing.active_children()}
    assert len(workers) == 2
    left = one.take(batches(N, 2, world(), 3, 1))
    assert len(list(itertools.islice(left, 3))) == 3
    same(one, other, 2)
    assert {process.pid for process in multiprocessing.active_children()} == workers
    assert torch.equal(torch.get_rng_state(), state)


def test_signals_to_the_whole_job_do_not_end_them(paths: list[str], started: None) -> None:
    """The rank answers; the processes go on until the rank has no more need of them."""
    one = folder(paths, 1)
    taken = one.take(batches(N, 2, world(), 1, 1))
    next(taken)
    (process,) = multiprocessing.active_children()
    assert process.pid is not None
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT):
        os.kill(process.pid, number)
    assert len(list(taken)) == 11
    assert process.is_alive()
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_bad_file_is_named(paths: list[str], started: None) -> None:
    """When its batch is taken, and not before; with processes and without."""
    Path(paths[11]).write_bytes(Path(paths[11]).read_bytes()[:60])
    for workers in (0, 1):
        taken = folder(paths, workers).take(in_order(N, 4, world()))
        assert len(list(itertools.islice(taken, 2))) == 2
        with pytest.raises(DataError, match=r"/11\.png cannot be read as an image"):
            next(taken)


def test_a_process_that_dies_is_an_error(paths: list[str], started: None) -> None:
    """At once, not at a timeout."""
    taken = folder(paths, 1).take(in_order(N, 2, world()))
    next(taken)
    (process,) = multiprocessing.active_children()
    process.kill()
    with pytest.raises(DataError, match="the processes that decode pictures have failed"):
        list(taken)


PROGRAM = """
import os, sys, torch
print("the job's own lines", flush=True)
os.environ["OMPI_COMM_WORLD_SIZE"] = "2"
from lockstep.data import Folder, in_order
from lockstep.data.folder import Files
from lockstep.world import World
paths = sys.argv[1:]
one = Folder(Files(paths, 8), torch.arange(len(paths)), (0.5,) * 3, (0.5,) * 3, ("a",), 2)
alone = World(0, 1, 0, 1, 0, 1, "host", None)
print(sum(len(y) for _, _, y in one.take(in_order(len(paths), 4, alone))), flush=True)
assert os.environ["OMPI_COMM_WORLD_SIZE"] == "2"
"""


def test_a_job_without_a_guard(tmp_path: Path, paths: list[str]) -> None:
    """Its own lines run once, and it ends without a word and with all its processes."""
    (tmp_path / "job.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "job.py"), *paths[:4]],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.splitlines() == ["the job's own lines", "4"]
    assert (done.returncode, done.stderr) == (0, "")
