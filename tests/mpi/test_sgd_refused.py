"""What would let the ranks drift apart, or sum what was not meant, is refused."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

from lockstep import World
from lockstep.errors import LockstepError
from lockstep.sgd import SynchronousSGD, synchronous
from training import (
    batch,
    network,
)


@pytest.mark.ranks(2)
def test_refuses_different_models(world: World) -> None:
    """On all ranks, naming the rank and the tensor."""
    model = nn.Linear(3, 2 if world.rank != 1 else 4)
    with pytest.raises(
        LockstepError, match=r"model on rank 1 is not that of rank 0: weight: .*4, 3"
    ):
        SynchronousSGD(model, world, lr=0.1)
    deeper = nn.Sequential(*[nn.Linear(2, 2)] * 1, *[nn.Linear(2, 2)] * (world.rank == 1))
    with pytest.raises(LockstepError, match=r"rank 1 is not that of rank 0: 1.weight: .*nothing"):
        SynchronousSGD(deeper, world, lr=0.1)


@pytest.mark.ranks(2)
def test_refuses_to_train_other_parameters(world: World) -> None:
    """One that is frozen on a rank alone, or another order: gradients would be summed crosswise."""
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(world.rank != 1)
    with pytest.raises(
        LockstepError, match=r"model on rank 1 .*: bias: .* that needs no gradient against bias"
    ):
        SynchronousSGD(model, world, lr=0.1)
    equal = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    order = list(equal.parameters())[:: -1 if world.rank == 1 else 1]
    with pytest.raises(
        LockstepError, match=r"list of parameters on rank 1 .*: 1.weight: .* against 0.weight"
    ):
        synchronous(torch.optim.SGD(order, lr=0.1), world, model=equal)


def test_what_would_go_wrong_in_silence_is_refused(world: World) -> None:
    """A second gradient in one backward, replaced parameters, odd numbers of examples."""
    model = network()
    sgd = SynchronousSGD(model, world, lr=0.1)
    for wrong in (-1, 2.5, True, "3"):
        with pytest.raises(ValueError, match="needed: a whole number of examples"):
            sgd.step(examples=wrong)
    x, y = batch(0)
    F.cross_entropy(model(x), y).backward()
    model[0].weight.data = model[0].weight.data.clone()
    with pytest.raises(ValueError, match="moved or replaced"):
        sgd.step(examples=len(x))
    for number in (-1.0, float("nan"), "x"):
        with pytest.raises(ValueError, match="found max_norm"):
            SynchronousSGD(model, world, lr=0.1, max_norm=number)
    with pytest.raises(ValueError, match="second gradient"):
        _checkpointed(world)


def _checkpointed(world: World) -> None:
    layer = nn.Linear(3, 3).double()
    sgd = SynchronousSGD(layer, world, lr=0.1, bucket_bytes=1)
    x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    for _ in range(3):
        x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True)
    sgd.backward(x.mean(), examples=2)


@pytest.mark.ranks(2)
def test_refuses_different_settings(world: World) -> None:
    """Another learning rate on one rank would make the ranks drift apart."""
    with pytest.raises(LockstepError, match=r"rank 1 is not that of rank 0: lr=0.2"):
        SynchronousSGD(network(), world, lr=0.2 if world.rank == 1 else 0.1)
    adam = torch.optim.Adam(network().parameters(), lr=0.2 if world.rank == 1 else 0.1)
    with pytest.raises(LockstepError, match=r"rank 1 is not that of rank 0: Adam.*'lr': 0.2"):
        synchronous(adam, world)


@pytest.mark.parametrize("wrong", [0, -1, 1.5])
def test_refuses_buckets_of_no_size(world: World, wrong: int) -> None:
    """They would be summed element by element."""
    with pytest.raises(ValueError, match=f"found bucket_bytes={wrong}"):
        SynchronousSGD(network(), world, lr=0.1, bucket_bytes=wrong)


def test_is_not_copied(world: World) -> None:
    """Two optimizers on one model would both sum its gradients."""
    model = network()
    sgd = SynchronousSGD(model, world, lr=0.1)
    for optimizer in (sgd, synchronous(torch.optim.Adam(network().parameters()), world)):
        with pytest.raises(TypeError, match="needed: one for each model"):
            copy.deepcopy(optimizer)
        optimizer.close()
