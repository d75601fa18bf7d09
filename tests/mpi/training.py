"""A small network, its batches and its steps, for the tests of optimizers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

from lockstep import World
from lockstep.sgd import SynchronousSGD

BATCH = 23
Pair = tuple[torch.Tensor, torch.Tensor]


def network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Return a small network, the same wherever it is made."""
    torch.manual_seed(3)
    layers = [nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 33), nn.Tanh(), nn.Linear(33, 4)]
    return nn.Sequential(*layers).to(dtype)


def batch(step: int, dtype: torch.dtype = torch.float64) -> Pair:
    """Return the joined batch of a step."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 7, generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.randint(0, 4, (BATCH,), generator=generator)


def share_of(world: World, step: int, pair: Pair) -> Pair:
    """Return this rank's part of a batch: uneven, sometimes empty."""
    generator = torch.Generator().manual_seed(1000 + step)
    cuts = torch.randint(0, BATCH + 1, (world.size - 1,), generator=generator).sort().values
    ends = [0, *cuts.tolist(), BATCH]
    part = slice(ends[world.rank], ends[world.rank + 1])
    return pair[0][part], pair[1][part]


def by_backward(model: nn.Module, sgd: SynchronousSGD, x: torch.Tensor, y: torch.Tensor) -> None:
    """Step with the sums overlapped."""
    if len(x):
        sgd.backward(F.cross_entropy(model(x), y), examples=len(x))
    sgd.step(examples=None if len(x) else 0)


def by_loss(model: nn.Module, sgd: SynchronousSGD, x: torch.Tensor, y: torch.Tensor) -> None:
    """Step after the loss's own backward."""
    if len(x):
        F.cross_entropy(model(x), y).backward()
    sgd.step(examples=len(x))


def by_pieces(model: nn.Module, sgd: SynchronousSGD, x: torch.Tensor, y: torch.Tensor) -> None:
    """Step with gradients accumulated over an uneven cut of the batch."""
    if len(x) > 1:
        with sgd.accumulate():
            sgd.backward(F.cross_entropy(model(x[:1]), y[:1]), examples=1)
        x, y = x[1:], y[1:]
    by_backward(model, sgd, x, y)


def distance(model: nn.Module, reference: nn.Module) -> float:
    """Return the largest relative difference of a parameter."""
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    with torch.no_grad():
        return max(float((p - q).abs().max() / q.abs().max()) for p, q in pairs)
