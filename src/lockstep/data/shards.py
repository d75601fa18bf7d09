"""Which images each rank takes, without a word between the ranks: all can work it out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from lockstep.world import World


@dataclass(frozen=True)
class Batch:
    """What the ranks take at one step.

    Attributes:
        indices: int64 [n], the images of this rank; at the end of an epoch n may be small, or 0.
        total: number of images that all ranks take together at this step, at least 1.
        joined: int64 [total], the images of all ranks, in the order of the ranks.
    """

    indices: torch.Tensor
    total: int
    joined: torch.Tensor


def batches(
    n: int, batch_size: int, world: World, seed: int, epoch: int, *, start: int = 0
) -> Iterator[Batch]:
    """Share out an epoch: every image once, in an order that is new in each epoch. Local.

    All ranks draw the same permutation, since all seed it alike, and yield the same number of
    batches, so that they can meet at every step. What is left for the last step is dealt out
    evenly: some ranks may get one image less than others, or none.

    Args:
        n: number of images.
        batch_size: images a rank takes at a step.
        world: the ranks.
        seed: the same on all ranks, 0 or more.
        epoch: number of the epoch; another one gives another order.
        start: first step to yield, for an epoch that is gone on with; the steps are the same ones.

    Yields:
        steps(n, batch_size, world) batches, less those before the start.
    """
    # numpy takes the pair as a seed; torch looks at 32 bits, and seed + epoch would meet again.
    order = torch.from_numpy(np.random.default_rng((seed, epoch)).permutation(n))
    return _deal(order, batch_size, world, start)


def in_order(n: int, batch_size: int, world: World) -> Iterator[Batch]:
    """Share out n images in the order they are in, to be looked at once each. Local.

    As `batches`: all ranks take the same number of steps, and of a short last one a rank may get no
    image. So a model that communicates, as DDP does for the sake of BatchNorm, can be tested too.
    """
    return _deal(torch.arange(n), batch_size, world, 0)


def _deal(order: torch.Tensor, batch_size: int, world: World, start: int) -> Iterator[Batch]:
    share = batch_size * world.size
    for first in range(start * share, len(order), share):
        joined = order[first : first + share]
        low, high = _part(len(joined), world)
        yield Batch(joined[low:high], len(joined), joined)


def steps(n: int, batch_size: int, world: World) -> int:
    """Return the number of steps of an epoch. Local."""
    return -(-n // (batch_size * world.size))


def slices(n: int, batch_size: int, world: World) -> Iterator[slice]:
    """Share out n images to be looked at once each, such as those of a test. Local.

    Together the slices of all ranks hold every image exactly once, however many ranks there are.

    Args:
        n: number of images.
        batch_size: the most images of a slice.
        world: the ranks.

    Yields:
        the slices of this rank, none if there are fewer images than ranks.
    """
    low, high = _part(n, world)
    for start in range(low, high, batch_size):
        yield slice(start, min(start + batch_size, high))


def _part(n: int, world: World) -> tuple[int, int]:
    """Return where the part of this rank begins and ends, if n things are dealt out evenly."""
    each, more = divmod(n, world.size)
    low = world.rank * each + min(world.rank, more)
    return low, low + each + (world.rank < more)
