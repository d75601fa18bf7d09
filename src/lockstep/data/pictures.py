"""Load a set of pictures with three colours, on all ranks, decoded by one of each node."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from lockstep.data.folder import Files, Folder
from lockstep.data.images import Images
from lockstep.data.room import free_memory
from lockstep.data.source import Source
from lockstep.ending import SETTLE, within
from lockstep.errors import DataError, SettingsError
from lockstep.together import on_all
from lockstep.world import World

if TYPE_CHECKING:
    from mpi4py import MPI

    from lockstep.data.tree import Tree

NAMES = ("cifar10", "imagefolder", "sample", "synthetic")
# Seconds that a download or a listing may stand still.
LIMIT = 900.0
# A set fits if it takes this share of the free memory at most.
_SHARE = 0.5
_DOING = "load the pictures"

ImageSet: TypeAlias = Images | Folder


def load_pictures(
    world: World,
    name: str,
    directory: Path,
    *,
    in_memory: str = "auto",
    workers: int = 2,
    size: int = 32,
) -> tuple[ImageSet, ImageSet]:
    """Return the pictures to train with and those to test with. Collective.

    A set that fits in memory is decoded once a node, by its first rank, into memory that the ranks
    of the node share; the others wait as long as the work goes on. Only "imagefolder" may be too
    large for that; then every batch is decoded anew, by processes beside each rank.

    Args:
        world: the ranks.
        name: "cifar10", all 60,000 of CIFAR-10, downloaded if need be; "imagefolder", the images in
            DIRECTORY/train/CLASS and DIRECTORY/test/CLASS; "sample", 5,000 digits with a margin;
            "synthetic", 12,000 that are made up.
        directory: where the files lie or are put; not looked at for the last two.
        in_memory: "auto" keeps what takes up to half of the memory that is free on each node; "yes"
            and "no" are obeyed.
        workers: processes a rank that decode what is not kept.
        size: height and width, in pixels; images of other shapes are cropped and scaled.

    Raises:
        SettingsError, DataError: on all ranks alike: settings that differ or make no sense, a file
            that is missing or damaged, too little memory, nodes that see different data. Of a set
            that is not kept, names and 64 files are compared; a file that cannot be read is found
            when its batch is taken, by the rank that takes it.
    """
    _check(world, name, in_memory, workers, size)
    return _load(world, name, directory, in_memory=in_memory, workers=workers, size=size)


def _load(
    world: World, name: str, directory: Path, *, in_memory: str, workers: int, size: int
) -> tuple[ImageSet, ImageSet]:
    # Not at the top: it loads MPI, which a process that decodes must not.
    from lockstep.data.in_memory import keep, node_of, plan_of, same, together

    leads = world.local_rank == 0
    together(world, _fetch(name, directory) if leads else iter(()), LIMIT)
    with node_of(world) as node:
        cores = _cores(node)
        source, tree = on_all(
            world, lambda: _open(name, directory, size, cores) if leads else _NOTHING, _DOING, LIMIT
        )
        outline = source and (source.classes, source.train.count, source.test.count)
        same(world, outline, "classes and numbers of pictures")
        plan = plan_of(node, source)
        if name != "imagefolder" or _fits(world, plan.bytes, in_memory):
            return keep(world, node, source, plan)
        mark = on_all(world, lambda: tree and tree.fingerprint(), _DOING, LIMIT)
        same(world, mark, "files")
        return _folders(node, plan, tree, workers)


_NOTHING: tuple[Source | None, Tree | None] = (None, None)


def _check(world: World, name: str, in_memory: str, workers: int, size: int) -> None:
    """Refuse what makes no sense, and what is not the same on all ranks. Collective."""

    def check() -> None:
        _need(name in NAMES, f"the data {name!r}", f"one of {', '.join(NAMES)}")
        _need(in_memory in ("auto", "yes", "no"), f"in_memory {in_memory!r}", "auto, yes or no")
        kept = name == "imagefolder" or in_memory != "no"
        _need(kept, f"in_memory 'no' with {name}", "imagefolder; other sets are small")
        _need(workers >= 0, f"{workers} workers", "0 or more")
        least = 28 if name == "sample" else 4
        _need(size >= least, f"size {size}", f"{least} or more for {name}")
        _need(name != "cifar10" or size == 32, f"size {size}", "32 for cifar10")

    on_all(world, check, _DOING)
    with within(SETTLE, _DOING):
        everyone = world.comm.allgather((name, in_memory, size))
    odd = next((other for other in everyone if other != everyone[0]), None)
    if odd is not None:
        raise SettingsError(
            f"rank {everyone.index(odd)} loads {odd}, rank 0 {everyone[0]}",
            needed="the same name, in_memory and size on all ranks",
            cure="give all ranks the same settings",
        )


def _need(good: bool, found: str, needed: str) -> None:
    if not good:
        raise SettingsError(f"found {found}", needed=needed, cure="change it")


def _fetch(name: str, directory: Path) -> Iterator[None]:
    if name == "cifar10":
        from lockstep.data import cifar10

        yield from cifar10.fetch(directory, LIMIT)


def _open(name: str, directory: Path, size: int, cores: set[int]) -> tuple[Source, Tree | None]:
    """Find the pictures; see load_pictures. Local."""
    if name == "imagefolder":
        # Not at the top: what decodes images is slow to import.
        from lockstep.data.tree import scan

        tree = scan(directory)
        return tree.source(size, cores), tree
    if name == "cifar10":
        from lockstep.data import cifar10

        return cifar10.load(directory), None
    from lockstep.data import synthetic

    return (synthetic.digits(size) if name == "sample" else synthetic.synthetic(size)), None


def _cores(node: MPI.Intracomm) -> set[int]:
    """Return the cores that the ranks of this node have. Collective."""
    with within(SETTLE, _DOING):
        return set().union(*node.allgather(os.sched_getaffinity(0)))


def _fits(world: World, size: int, in_memory: str) -> bool:
    """Say whether so many bytes are to be kept on each node; the same on all ranks. Collective."""
    from mpi4py import MPI

    if in_memory == "no":
        return False
    free = free_memory() if world.local_rank == 0 else sys.maxsize
    with within(SETTLE, _DOING):
        least = world.comm.allreduce(free, MPI.MIN)
    if in_memory == "yes" and size > least:
        # Checked before: to find out by trying may cost other processes their lives.
        raise DataError(
            f"the pictures take {size >> 20} MiB, and on some node {least >> 20} MiB are free",
            needed="room for all of them",
            cure="--in-memory auto or no, a smaller size, or more memory for the job",
        )
    return in_memory == "yes" or bool(size <= _SHARE * least)


def _folders(
    node: MPI.Intracomm, plan: Source, tree: Tree | None, workers: int
) -> tuple[Folder, Folder]:
    """Tell the ranks of the node which files there are. Collective."""
    found = [Files(paths, plan.size) for paths in tree.paths] if tree else []
    with within(LIMIT, _DOING):
        files = node.bcast(found)
    train, test = (
        Folder(each, part.labels, plan.mean, plan.deviation, plan.classes, workers)
        for each, part in zip(files, (plan.train, plan.test), strict=True)
    )
    return train, test
