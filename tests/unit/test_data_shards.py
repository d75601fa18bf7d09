"""Which images each rank takes: all of them once, whatever the number of ranks."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from lockstep.data import batches, in_order, slices, steps
from lockstep.world import World

WORLDS = (1, 2, 3, 4, 7)


def worlds(size: int) -> list[World]:
    """Return the world as each of its ranks sees it; they have nobody to talk to."""
    return [World(rank, size, rank, size, 0, 1, "host", cast(Any, None)) for rank in range(size)]


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize(("n", "batch_size"), [(100, 8), (101, 10), (64, 16), (5, 4), (1, 3)])
def test_an_epoch_holds_every_image_once(size: int, n: int, batch_size: int) -> None:
    """All ranks yield as many batches, which are parts of the same joined ones."""
    shards = [list(batches(n, batch_size, world, 1, 1)) for world in worlds(size)]
    assert {len(shard) for shard in shards} == {steps(n, batch_size, worlds(size)[0])}
    seen = []
    for parts in zip(*shards, strict=True):
        lengths = [len(part.indices) for part in parts]
        assert max(lengths) - min(lengths) <= 1
        assert max(lengths) <= batch_size
        joined = torch.cat([part.indices for part in parts])
        for part in parts:
            assert torch.equal(part.joined, joined)
            assert part.total == len(joined) == sum(lengths)
        seen.append(joined)
    assert sorted(torch.cat(seen).tolist()) == list(range(n))


def test_the_order_is_new_in_each_epoch_and_for_each_seed() -> None:
    """And the same again for the same ones."""
    world = worlds(1)[0]

    def order(seed: int, epoch: int) -> tuple[int, ...]:
        return tuple(torch.cat([b.indices for b in batches(50, 8, world, seed, epoch)]).tolist())

    assert order(1, 1) == order(1, 1)
    assert len({order(seed, epoch) for seed in range(4) for epoch in range(4)}) == 16


def test_the_joined_batch_does_not_depend_on_how_it_is_shared() -> None:
    """Two ranks with 8 take what four ranks with 4 take."""
    two, four = batches(100, 8, worlds(2)[1], 1, 3), batches(100, 4, worlds(4)[3], 1, 3)
    assert all(torch.equal(a.joined, b.joined) for a, b in zip(two, four, strict=True))


@pytest.mark.parametrize("start", [0, 1, 4, 5, 9])
def test_an_epoch_that_is_gone_on_with(start: int) -> None:
    """The same batches, without those before the start; after the last there is none."""
    world = worlds(3)[1]
    whole = list(batches(100, 8, world, 1, 2))
    rest = list(batches(100, 8, world, 1, 2, start=start))
    assert len(rest) == max(0, len(whole) - start)
    for one, other in zip(whole[start:], rest, strict=True):
        assert torch.equal(one.indices, other.indices)
        assert one.total == other.total


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("n", [1, 3, 10, 1000])
def test_in_order_every_image_comes_once(size: int, n: int) -> None:
    """In order, and all ranks take as many steps."""
    shards = [list(in_order(n, 4, world)) for world in worlds(size)]
    assert {len(shard) for shard in shards} == {steps(n, 4, worlds(size)[0])}
    joined = [part.indices for parts in zip(*shards, strict=True) for part in parts]
    assert torch.cat(joined).tolist() == list(range(n))


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("n", [0, 1, 3, 10, 1000])
def test_slices_cover_everything_once(size: int, n: int) -> None:
    """However many ranks there are, and few images for them."""
    seen = [i for w in worlds(size) for part in slices(n, 4, w) for i in range(n)[part]]
    assert seen == list(range(n))
