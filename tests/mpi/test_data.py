"""Pictures on all ranks: decoded once a node, shared, compared; what is wrong is said on all."""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from mpi4py import MPI
from PIL import Image

from lockstep import World
from lockstep.data import Folder, Images, in_order, load_pictures, tree
from lockstep.data.in_memory import together
from lockstep.errors import CollectiveTimeout, DataError, LockstepError, SettingsError

COUNTS = {"train/ant": 6, "train/bee": 5, "test/ant": 2, "test/bee": 3}


def make(root: Path) -> Path:
    """Write images of 8x8 pixels into folders."""
    random = np.random.default_rng(1)
    for folder, count in COUNTS.items():
        (root / folder).mkdir(parents=True)
        for number in range(count):
            pixels = random.integers(256, size=(8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / folder / f"{number}.png")
    return root


@pytest.fixture
def shared(tmp_path: Path, comm: MPI.Intracomm) -> Iterator[Path]:
    """Return one directory of images for all ranks."""
    place: Path = comm.bcast(tmp_path, root=0)
    if comm.rank == 0:
        make(place / "images")
    comm.barrier()
    yield place / "images"
    comm.barrier()


def apart(world: World) -> World:
    """Return the world as if each rank were on a node of its own."""
    host = f"node{world.rank}"
    return replace(world, node=world.rank, nodes=world.size, local_rank=0, local_size=1, host=host)


def frames(tensor: torch.Tensor) -> list[int]:
    """Return the page frames that a tensor lies in; 0 where the kernel hides their numbers."""
    page, first = os.sysconf("SC_PAGESIZE"), tensor.data_ptr()
    begin, end = first // page, (first + tensor.numel() - 1) // page
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(8 * begin)
        entries = np.frombuffer(file.read(8 * (end - begin + 1)), dtype=np.uint64)
    assert (entries >> np.uint64(63)).all(), "a page that is not there"
    return (entries & np.uint64((1 << 55) - 1)).tolist()


def inode(tensor: torch.Tensor) -> tuple[str, str]:
    """Return device and inode of the file that a tensor is mapped from."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, device, number, *_ = line.split()
        low, high = (int(part, 16) for part in span.split("-"))
        if low <= tensor.data_ptr() < high:
            return device, number
    raise AssertionError("it is mapped nowhere")


def test_the_ranks_of_a_node_share_the_same_memory(world: World, comm: MPI.Intracomm) -> None:
    """The same file, the same page frames; what one writes all see."""
    train, test = load_pictures(world, "synthetic", Path("unused"))
    assert isinstance(train, Images)
    assert isinstance(test, Images)
    assert (len(train), len(test)) == (10_000, 2_000)
    for part in (train, test):
        assert len(set(comm.allgather(inode(part.images)))) == 1
        int(part.images.sum())  # maps all pages into this process
        first = part.images[:1000].contiguous()
        assert len({tuple(it) for it in comm.allgather(frames(first))}) == 1
        assert first.data_ptr() == part.images.data_ptr()
    before = int(train.images[5, 1, 3, 4])
    comm.barrier()
    if world.rank == world.size - 1:
        train.images[5, 1, 3, 4] = 255 - before
    comm.barrier()
    assert int(train.images[5, 1, 3, 4]) == 255 - before


@pytest.mark.parametrize("nodes", ["one node", "a node each"])
def test_one_rank_a_node_decodes(
    world: World, comm: MPI.Intracomm, shared: Path, nodes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file once, whatever the number of ranks; all have all pictures in the end."""
    decoded: list[str] = []
    really = tree.fill

    def fill(paths: list[str], *rest: object) -> Iterator[None]:
        decoded.extend(paths)
        return really(paths, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(tree, "fill", fill)
    seen = world if nodes == "one node" else apart(world)
    train, test = load_pictures(seen, "imagefolder", shared, size=8)
    assert isinstance(train, Images)
    assert len(decoded) == (16 if seen.local_rank == 0 else 0)
    assert (len(train), len(test), train.classes) == (11, 5, ("ant", "bee"))
    assert train.labels.tolist() == [0] * 6 + [1] * 5
    for number in range(6):
        pixels = np.asarray(Image.open(shared / "train" / "ant" / f"{number}.png"))
        assert np.array_equal(train.images[number].permute(1, 2, 0).numpy(), pixels)
    comm.barrier()


def everyone_gets(
    comm: MPI.Intracomm,
    kind: type[LockstepError],
    words: str,
    world: World,
    *rest: object,
    **named: object,
) -> str:
    """Load, and see to it that the same error comes on all ranks."""
    with pytest.raises(kind, match=words) as caught:
        load_pictures(world, *rest, **named)  # type: ignore[arg-type]
    texts = set(comm.allgather(f"{type(caught.value)} {caught.value}"))
    assert len(texts) == 1
    return texts.pop()


@pytest.mark.parametrize("in_memory", ["yes", "no"])
def test_nodes_that_see_other_pictures(
    world: World, comm: MPI.Intracomm, shared: Path, tmp_path: Path, in_memory: str
) -> None:
    """A pixel, a name, a class: told on all ranks; a copy elsewhere is the same data."""
    mine = shutil.copytree(shared, tmp_path / "copy")
    options = {"in_memory": in_memory, "size": 8}
    load_pictures(apart(world), "imagefolder", mine, **options)  # type: ignore[arg-type]
    if world.size == 1:
        return
    last = world.rank == world.size - 1
    if last:
        path = mine / "train" / "bee" / "2.png"
        pixels = np.asarray(Image.open(path)).copy()
        pixels[3, 4, 1] ^= 1
        Image.fromarray(pixels).save(path)
    arguments = (apart(world), "imagefolder", mine)
    text = everyone_gets(comm, DataError, "are not those on", *arguments, **options)
    assert f"on node{world.size - 1} are not those on node0" in text
    if last:
        (mine / "test" / "ant" / "1.png").unlink()
    everyone_gets(comm, DataError, "numbers of pictures on", *arguments, **options)
    if last:
        shutil.rmtree(mine / "test" / "bee")
    everyone_gets(comm, DataError, "classes in one part only", *arguments, **options)
    if last:
        shutil.rmtree(mine)
    everyone_gets(comm, DataError, "train cannot be read", *arguments, **options)


def test_a_truncated_picture(world: World, comm: MPI.Intracomm, shared: Path) -> None:
    """It is named on all ranks, though one rank has looked."""
    path = shared / "test" / "bee" / "1.png"
    if world.rank == 0:
        path.write_bytes(path.read_bytes()[:90])
    comm.barrier()
    words = "test/bee/1.png cannot be read as an image"
    everyone_gets(comm, DataError, words, world, "imagefolder", shared, size=8)


def test_what_cannot_be_asked_for(world: World, comm: MPI.Intracomm, shared: Path) -> None:
    """Names, sizes, and settings that are not the same on all ranks."""
    here = (world, "sample", shared)
    everyone_gets(comm, SettingsError, "'mnist'", world, "mnist", shared)
    everyone_gets(comm, SettingsError, "size 27", *here, size=27)
    everyone_gets(comm, SettingsError, "in_memory 'no' with sample", *here, in_memory="no")
    everyone_gets(comm, SettingsError, "-1 workers", *here, workers=-1)
    everyone_gets(comm, SettingsError, "size 33", world, "cifar10", shared, size=33)
    if world.size > 1:
        name = "sample" if world.rank else "synthetic"
        everyone_gets(comm, SettingsError, "rank 1 loads", world, name, shared)


def test_more_than_the_memory_holds(world: World, comm: MPI.Intracomm, shared: Path) -> None:
    """Refused before it is tried; left to itself it is not kept."""
    options = {"size": 1 << 16, "workers": 0}
    arguments = (world, "imagefolder", shared)
    everyone_gets(comm, DataError, "MiB are free", *arguments, in_memory="yes", **options)
    train, _ = load_pictures(*arguments, **options)  # type: ignore[arg-type]
    assert isinstance(train, Folder)


@pytest.mark.ranks(2)
def test_a_wait_ends_when_nothing_goes_on(world: World, comm: MPI.Intracomm) -> None:
    """Slow work is waited for beyond the limit, as long as it goes on."""

    def work(pieces: int, seconds: float) -> Iterator[None]:
        for _ in range(pieces):
            time.sleep(seconds)  # this is the work
            yield

    start = time.monotonic()
    together(world, work(6, 0.6) if world.rank == 0 else iter(()), 3.0)
    assert time.monotonic() - start > 3.5
    # On a communicator of its own, which is of no use afterwards: rank 0 never comes to it.
    lonely = replace(world, comm=comm.Dup())
    if world.rank:
        with pytest.raises(CollectiveTimeout, match="load the pictures"):
            together(lonely, iter(()), 0.3)
    comm.barrier()


@pytest.mark.limit(240)
def test_processes_that_decode_know_nothing_of_mpi(
    world: World, comm: MPI.Intracomm, shared: Path
) -> None:
    """The same batches as from memory; no MPI, none of its launcher's variables, no signals."""
    kept, _ = load_pictures(world, "imagefolder", shared, size=8)
    train, _ = load_pictures(world, "imagefolder", shared, size=8, in_memory="no", workers=1)
    assert isinstance(train, Folder)
    pairs = zip(train.take(in_order(11, 3, world)), kept.take(in_order(11, 3, world)), strict=True)
    for (_, x, y), (_, expected, labels) in pairs:
        assert torch.equal(x, expected)
        assert torch.equal(y, labels)
    (process,) = multiprocessing.active_children()
    there = Path(f"/proc/{process.pid}")
    assert "libtorch" in (there / "maps").read_text()
    assert not re.search(r"libmpi|mpi4py/MPI", (there / "maps").read_text())
    variables = (there / "environ").read_bytes()
    # Those by which a library would take it for a rank.
    identity = rb"(^|\0)(OMPI_COMM_WORLD_|PMI_|PMIX_(RANK|NAMESPACE|SERVER)|HYDI_|MPI_LOCAL)"
    assert not re.search(identity, variables)
    blocked = re.search(r"SigBlk:\s*(\w+)", (there / "status").read_text())
    assert blocked
    for number in (2, 10, 12, 15):
        assert int(blocked[1], 16) >> (number - 1) & 1
    comm.barrier()
