"""Decode a set of pictures once a node, into memory that the ranks of the node share."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from mpi4py import MPI

from lockstep.data.images import Images
from lockstep.data.source import Part, Source
from lockstep.ending import SETTLE, within
from lockstep.errors import DataError, LockstepError
from lockstep.shared_memory import Segment
from lockstep.together import on_all
from lockstep.world import World

# Seconds after which a rank tells the others that its work goes on; and within which it must.
_PIECE, LIMIT = 0.5, 300.0
_DOING = "load the pictures"


@contextmanager
def node_of(world: World) -> Iterator[MPI.Intracomm]:
    """Open a communicator of the ranks of this node, for a ``with``. Collective."""
    with within(LIMIT, "opening a communicator for each node"):
        node: Any = world.comm.Split(world.node, world.rank)
    yield node
    # Not after an error: the other ranks may not come.
    node.Free()


def plan_of(node: MPI.Intracomm, source: Source | None) -> Source:
    """Return the source of the first rank of a node, without a way to decode. Collective."""
    bare = source
    if source is not None:
        train, test = (Part(part.labels, _nothing) for part in (source.train, source.test))
        bare = replace(source, train=train, test=test)
    with within(LIMIT, _DOING):
        plan: Source = node.bcast(bare)
    return plan


def _nothing(into: torch.Tensor) -> Iterator[None]:
    return iter(())


def keep(
    world: World, node: MPI.Intracomm, source: Source | None, plan: Source
) -> tuple[Images, Images]:
    """Return the pictures to train with and those to test with, decoded. Collective.

    Args:
        world, node: the ranks, and those of this node.
        source: on the first rank of each node, which decodes; None on the others.
        plan: of plan_of.

    Raises:
        DataError: on all ranks alike: a picture cannot be read, there is no memory, or the nodes
            see different pictures.
    """
    segment = on_all(world, lambda: _segment(node, plan.bytes), _DOING)
    pixels = segment.tensor(0, torch.uint8, plan.bytes).view(-1, 3, plan.size, plan.size)
    images = pixels.split([plan.train.count, plan.test.count])
    together(world, _decode(source, images))
    same(world, source and _fingerprint(source, pixels), "pictures")
    train, test = (
        Images(pictures, part.labels, plan.mean, plan.deviation, plan.classes)
        for pictures, part in zip(images, (plan.train, plan.test), strict=True)
    )
    return train, test


def _segment(node: MPI.Intracomm, total: int) -> Segment:
    """Return memory for the node's ranks, of so many bytes together. Collective."""
    with within(LIMIT, "sharing memory with the ranks of this node"):
        try:
            return Segment(node, -(-total // node.size), "the pictures")
        except LockstepError as error:
            cure = f"{error.cure}; or --in-memory no"
            raise DataError(error.found, needed=error.needed, cure=cure) from error


def _decode(source: Source | None, images: Sequence[torch.Tensor]) -> Iterator[None]:
    if source is not None:
        yield from source.train.fill(images[0])
        yield from source.test.fill(images[1])


def _fingerprint(source: Source, pixels: torch.Tensor) -> int:
    labels = torch.cat([source.train.labels, source.test.labels])
    both: list[Any] = [labels.numpy(), pixels.numpy()]
    return zlib.crc32(both[1], zlib.crc32(both[0]))


def together(world: World, work: Iterator[object], limit: float = LIMIT) -> None:
    """Do all the work of every rank, and wait for as long as the slowest goes on. Collective.

    Args:
        work: of this rank, in pieces; it may be none.
        limit: seconds that a piece may take.

    Raises:
        LockstepError: on all ranks, what the work of one has raised.
        CollectiveTimeout: a rank has not done a piece within the limit.
    """
    more = True
    while more:
        mine = on_all(world, lambda: _some(work), _DOING, limit)
        with within(SETTLE, _DOING):
            more = world.comm.allreduce(mine, MPI.LOR)


def _some(work: Iterator[object]) -> bool:
    """Work for a while; say whether there is more."""
    end = time.monotonic() + _PIECE
    return any(time.monotonic() > end for _ in work)


def same(world: World, mine: object, what: str) -> None:
    """See to it that all nodes have found the same. Collective; all ranks have just met.

    Args:
        mine: what was found, small and comparable; None on ranks that did not look.
        what: that is, for the message.

    Raises:
        DataError: on all ranks, which nodes differ from the first one.
    """
    with within(SETTLE, "comparing the data of the nodes"):
        everyone = world.comm.allgather((world.host, mine))
    found = [(host, theirs) for host, theirs in everyone if theirs is not None]
    odd = [host for host, theirs in found if theirs != found[0][1]]
    if odd:
        raise DataError(
            f"the {what} on {', '.join(odd[:6])} are not those on {found[0][0]}",
            needed="the same data on all nodes",
            cure="copy it again, or name a directory that all nodes share with --data-dir",
        )
