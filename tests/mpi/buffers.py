"""Buffers and the numbers in them, for the tests of what sums them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lockstep import World
from lockstep.reducers import Kind, Reducer, make

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
# Around a cache line, a chunk of the kernel, and a block of torch's.
LENGTHS = [0, 1, 2, 3, 7, 15, 16, 17, 31, 33, 64, 1000, 1023, 1024, 1025, 16_383, 16_385, 40_001]
CPU = torch.device("cpu")


def kinds_of(length: int) -> list[Kind]:
    """Return a buffer of each dtype."""
    return [(dtype, CPU, length) for dtype in DTYPES]


def nodes_of(world: World) -> list[Sequence[int]]:
    """Return ways to spread the ranks over nodes, even and uneven ones."""
    n = world.size
    ways: list[Sequence[int]] = [[n], [1] * n]
    ways += [[n // 2, n - n // 2]] if n > 1 else []
    ways += [[n - 1, 1]] if n > 2 else []
    ways += [[1, n - 2, 1]] if n > 3 else []
    return ways


def open_reducer(world: World, group: Any, length: int) -> Reducer:
    """Make the reducer that goes with the number of nodes."""
    name = "shared" if world.nodes == 1 else "hierarchical"
    return make(name, kinds_of(length), world, group)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits; which NaN a sum gives, no standard says."""
    return tensor.masked_fill(tensor.isnan(), float("nan")).view(torch.uint8).clone()


def odd_numbers(dtype: torch.dtype, length: int, rank: int) -> torch.Tensor:
    """Return numbers of all magnitudes, and those that arithmetic treats in its own way."""
    generator = torch.Generator().manual_seed(31 * length + rank)
    numbers = torch.randn(length, generator=generator, dtype=torch.float64)
    numbers *= 10.0 ** torch.randint(-8, 5, (length,), generator=generator)
    odd = [float("inf"), -float("inf"), float("nan"), 0.0, -0.0, 1e-310, 1e-45, 6e-8, 65504.0, 3e38]
    places = torch.randint(0, max(length, 1), (len(odd),), generator=generator)
    if length > 2 * len(odd):
        numbers[places] = torch.tensor(odd, dtype=torch.float64)
    if length > 100:
        numbers[-40:] = (-1.0) ** rank * 1e4 + rank * 1e-3  # what is large cancels
    return numbers.to(dtype)
