"""Both ways to step take the step that one rank takes on the joined batch."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from lockstep import World
from lockstep.batchnorm import synchronous_batchnorm
from lockstep.data import batches
from lockstep.errors import LockstepError
from lockstep.sgd import divergence
from lockstep.steps import AllReduceStep, DistributedStep, Step, parts_of

WAYS = [DistributedStep, AllReduceStep]
LOSS = partial(F.cross_entropy, reduction="sum", label_smoothing=0.1)
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "adam": partial(torch.optim.Adam, lr=1e-2),
    "adamw": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
}
# A short batch at the end of each epoch: fewer images than ranks at 3, so that one has none.
BATCH, MOST = 6, 2


def network(normalised: bool) -> nn.Sequential:
    """Return a small network, the same wherever it is made."""
    torch.manual_seed(3)
    layers: list[nn.Module] = [nn.Conv2d(3, 5, 3, padding=1, bias=not normalised)]
    layers += [nn.BatchNorm2d(5)] if normalised else []
    layers += [nn.Tanh(), nn.Conv2d(5, 4, 3), nn.Tanh(), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(16, 4)).double()


def pictures(world: World) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a set of two whole batches and two images more."""
    generator = torch.Generator().manual_seed(5)
    n = 2 * BATCH * world.size + 2
    x = torch.randn(n, 3, 6, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 4, (n,), generator=generator)


def train(step: Step, world: World, most: int, epochs: int = 3) -> None:
    """Train for some epochs, in micro-batches of at most so many images."""
    x, y = pictures(world)
    for epoch in range(epochs):
        for batch in batches(len(y), BATCH, world, 1, epoch):
            mine = x[batch.indices], y[batch.indices]
            step.step(parts_of(*mine, batch.total, world.size, most), batch.total)


def alone(model: nn.Module, optimizer: Any, world: World, most: int, norm: float | None) -> None:
    """Train likewise on this rank alone: the micro-batches of all ranks are joined."""
    x, y = pictures(world)
    for epoch in range(3):
        for batch in batches(len(y), BATCH, world, 1, epoch):
            shares = batch.joined.tensor_split(world.size)
            cuts = [parts_of(x[i], y[i], batch.total, world.size, most) for i in shares]
            optimizer.zero_grad()
            for column in zip(*cuts, strict=True):
                inputs, labels = (torch.cat(parts) for parts in zip(*column, strict=True))
                (LOSS(model(inputs), labels) / batch.total).backward()
            if norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), norm)
            optimizer.step()


def check_close(model: nn.Module, reference: nn.Module) -> None:
    """Compare all parameters and buffers."""
    expected = reference.state_dict()
    for name, found in model.state_dict().items():
        torch.testing.assert_close(found, expected[name], rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.parametrize("most", [BATCH, MOST], ids=["whole", "accumulated"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("way", WAYS)
def test_equals_one_rank(world: World, way: type[Step], optimizer: str, most: int) -> None:
    """Three epochs with a short last batch, from other weights on each rank but the root."""
    reference, model = network(False), network(False)
    if world.rank:
        for parameter in model.parameters():
            parameter.data.normal_()
    alone(reference, OPTIMIZERS[optimizer](reference.parameters()), world, most, None)
    step = way(model, OPTIMIZERS[optimizer](model.parameters()), world, loss=LOSS)
    train(step, world, most)
    check_close(model, reference)
    assert divergence(model, world) == 0.0


@pytest.mark.parametrize("most", [BATCH, MOST], ids=["whole", "accumulated"])
@pytest.mark.parametrize("way", WAYS)
def test_synchronous_batchnorm_equals_one_rank(world: World, way: type[Step], most: int) -> None:
    """Statistics of the joined batch, running ones too, also where a rank has no image."""
    reference, model = network(True), synchronous_batchnorm(network(True))
    alone(reference, OPTIMIZERS["sgd"](reference.parameters()), world, most, None)
    train(way(model, OPTIMIZERS["sgd"](model.parameters()), world, loss=LOSS), world, most)
    check_close(model, reference)
    assert divergence(model, world) == 0.0


@pytest.mark.parametrize("most", [BATCH, MOST], ids=["whole", "accumulated"])
def test_plain_batchnorm_agrees(world: World, most: int) -> None:
    """Each rank looks at its own images; both ways do the same, and keep the root's statistics."""
    models = [network(True) for _ in WAYS]
    for way, model in zip(WAYS, models, strict=True):
        train(way(model, OPTIMIZERS["adam"](model.parameters()), world, loss=LOSS), world, most)
        assert divergence(model, world) == 0.0
    check_close(*models)


@pytest.mark.parametrize("way", WAYS)
def test_clipped(world: World, way: type[Step]) -> None:
    """The norm is that of the joined gradient."""
    reference, model = network(False), network(False)
    alone(reference, torch.optim.SGD(reference.parameters(), lr=0.5), world, BATCH, 0.05)
    train(
        way(model, torch.optim.SGD(model.parameters(), lr=0.5), world, loss=LOSS, max_norm=0.05),
        world,
        BATCH,
    )
    check_close(model, reference)


@pytest.mark.parametrize("way", WAYS)
def test_goes_on_from_its_state(world: World, way: type[Step]) -> None:
    """A new step with the state of an old one gives the same bits as the old one."""
    first, other = network(True).float(), network(True).float()
    optimizer = torch.optim.Adam(first.parameters(), lr=1e-2)
    old = way(first, optimizer, world, loss=LOSS, deterministic=True)
    x, y = pictures(world)
    mine = x[world.rank :: world.size].float(), y[world.rank :: world.size]

    def go(step: Step) -> None:
        for _ in range(3):
            step.step([mine], len(y))

    go(old)
    state = deepcopy(old.state_dict())
    go(old)
    made = torch.optim.Adam(other.parameters(), lr=1e-2)
    new = way(other, made, world, loss=LOSS, deterministic=True)
    new.load_state_dict(state)
    go(new)
    for name, found in first.state_dict().items():
        assert torch.equal(found, other.state_dict()[name]), name


@pytest.mark.parametrize("way", WAYS)
def test_the_loss_is_that_of_the_rank(world: World, way: type[Step]) -> None:
    """The mean over its images; 0 where there are none; likewise in bfloat16."""
    for amp, limit in ((None, 1e-6), (torch.bfloat16, 0.03)):
        model = network(False).float()
        x, y = pictures(world)
        x, y = (x.float(), y) if world.rank == 0 else (x[:0].float(), y[:0])
        with torch.no_grad():
            expected = LOSS(model(x), y) / max(1, len(y))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = way(model, optimizer, world, loss=LOSS, amp=amp)
        found = step.step(parts_of(x, y, world.size * len(y), world.size, 100), _total(len(y)))
        assert not found.requires_grad
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, rtol=limit, atol=limit)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", WAYS)
def test_another_model_on_a_rank(world: World, way: type[Step]) -> None:
    """One error on all ranks that names the rank."""
    model = network(world.rank == 1)
    with pytest.raises(LockstepError, match="rank 1"):
        way(model, torch.optim.SGD(model.parameters(), lr=0.1), world, loss=LOSS)


def test_parts() -> None:
    """As many on each rank, none larger than allowed, nothing lost."""
    x = torch.arange(9.0)
    for n in (8, 9):
        parts = parts_of(x[:n], x[:n], 17, 2, 4)
        assert [len(part) for part, _ in parts] == ([3, 3, 2] if n == 8 else [3, 3, 3])
        assert torch.equal(torch.cat([part for part, _ in parts]), x[:n])
    assert len(parts_of(x, x, 9, 1, 9)) == 1
    assert [len(part) for part, _ in parts_of(x[:0], x[:0], 1, 3, 4)] == [0]


def _total(mine: int) -> int:
    total = torch.tensor(mine)
    dist.all_reduce(total)
    return int(total)
