"""Proofs that a training job ends with, measured in its own run."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator
from contextlib import nullcontext
from copy import deepcopy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from lockstep.data import Batch, Images, batches
from lockstep.settings import Classic
from lockstep.sgd import SynchronousSGD, divergence
from lockstep.world import World


def proofs(
    model: nn.Module,
    initial: nn.Module,
    images: Images,
    settings: Classic,
    world: World,
    *,
    allreduce: str = "auto",
) -> dict[str, float]:
    """Compare the ranks; and, if settings ask to verify, the first steps done three ways.

    Collective. From the first weights: by the SGD written by hand, by DistributedDataParallel, and
    by each rank alone with the joined batches; without dropout, which each rank draws for itself;
    in float64: in float32 another order of additions can make a max-pool choose another pixel.

    Args:
        model: after the training.
        initial: the same before it.
        images, settings, world: what it was trained with; settings.verify is the number of steps.
        allreduce: algorithm for the SGD written by hand.

    Returns:
        name and value of each proof; the differences between the ways are those of a weight,
        relative to the largest of its tensor.
    """
    found = {"divergence between ranks": divergence(model, world)}
    if not settings.verify:
        return found
    alone = _alone(deepcopy(initial).double(), images, settings, world)
    by_hand = _by_hand(deepcopy(initial).double(), images, settings, world, allreduce)
    ddp = _ddp(deepcopy(initial).double(), images, settings, world)
    for ways, one, other in (
        ("by hand and on one rank with the joined batch", by_hand, alone),
        ("by DDP and on one rank with the joined batch", ddp, alone),
        ("by hand and by DDP", by_hand, ddp),
    ):
        what = f"verify: {settings.verify} steps in float64 {ways}"
        found[f"{what}, largest relative difference"] = _difference(one, other)
    return found


def joint_loss(output: torch.Tensor, labels: torch.Tensor, total: int, size: int) -> torch.Tensor:
    """Return the loss of a rank whose mean over the ranks is that of the joined batch. Local.

    DistributedDataParallel averages over ranks, not over images; with this loss short and empty
    batches count for what they are.

    Args:
        output: [n, 10], logarithms of probabilities; n may be 0.
        labels: int64 [n].
        total: images on all ranks together.
        size: number of ranks.
    """
    return F.nll_loss(output, labels, reduction="sum") * (size / total)


def communication_share(
    model: DistributedDataParallel, images: Images, settings: Classic, world: World
) -> float:
    """Return which share of a step of DDP is communication, 0 to 1. Collective.

    DDP communicates while it computes, so this is measured from outside: steps with and without
    communication, in turn, by the slowest rank. The model is not changed, its gradients are.
    """
    x, y = images.batch(slice(0, settings.batch_size))
    times: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(24):
        for together in (True, False):
            start = time.perf_counter()
            with nullcontext() if together else model.no_sync():
                joint_loss(model(x), y, len(y) * world.size, world.size).backward()
            if x.is_cuda:
                torch.cuda.synchronize()
            if turn >= 4:
                times[together].append(time.perf_counter() - start)
    slowest = torch.tensor([times[True], times[False]], device=x.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    joined, apart = (statistics.median(row) for row in slowest.tolist())
    return max(0.0, 1.0 - apart / joined)


def _first(images: Images, settings: Classic, world: World) -> Iterator[Batch]:
    epochs = (
        batches(len(images), settings.batch_size, world, settings.seed, epoch)
        for epoch in itertools.count(1)
    )
    return itertools.islice(itertools.chain.from_iterable(epochs), settings.verify)


def _batch(images: Images, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = images.batch(indices)
    return x.double(), y


def _alone(model: nn.Module, images: Images, settings: Classic, world: World) -> nn.Module:
    model.eval()
    sgd = torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=settings.momentum)
    for batch in _first(images, settings, world):
        x, y = _batch(images, batch.joined)
        sgd.zero_grad()
        F.nll_loss(model(x), y).backward()
        sgd.step()
    return model


def _by_hand(
    model: nn.Module, images: Images, settings: Classic, world: World, allreduce: str
) -> nn.Module:
    model.eval()
    sgd = SynchronousSGD(
        model, world, lr=settings.lr, momentum=settings.momentum, allreduce=allreduce
    )
    for batch in _first(images, settings, world):
        x, y = _batch(images, batch.indices)
        sgd.zero_grad()
        if len(y):
            F.nll_loss(model(x), y).backward()
        sgd.step(examples=len(y))
    return model


def _ddp(model: nn.Module, images: Images, settings: Classic, world: World) -> nn.Module:
    ddp = DistributedDataParallel(model.eval())
    sgd = torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=settings.momentum)
    for batch in _first(images, settings, world):
        x, y = _batch(images, batch.indices)
        sgd.zero_grad()
        joint_loss(ddp(x), y, batch.total, world.size).backward()
        sgd.step()
    return model


def _difference(one: nn.Module, other: nn.Module) -> float:
    """Return the largest difference on any rank, relative to the largest weight of the tensor."""
    found = torch.stack(
        [
            (a.detach() - b.detach()).abs().max() / b.detach().abs().max()
            for a, b in zip(one.parameters(), other.parameters(), strict=True)
        ]
    ).max()
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()
