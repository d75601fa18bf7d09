"""Train the MNIST network in step on all ranks, by an SGD whose all-reduce is written out by hand.

    mpirun -np 4 python jobs/sync_sgd.py --fast
    mpirun -np 2 python jobs/sync_sgd.py --data mnist --allreduce ring --verify 10

Each rank takes its own part of every batch; the gradients are summed over the ranks while backward
still runs, in the steps that lockstep/allreduce.py spells out; then all take the same step. The
flags are those of the classic PyTorch MNIST script.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

import lockstep
from lockstep import compress
from lockstep.allreduce import NAMES
from lockstep.data import Images, batches, load, steps
from lockstep.journal import Journal
from lockstep.metrics import done_already
from lockstep.models import ConvNet
from lockstep.proof import proofs
from lockstep.settings import Classic, flag, parse
from lockstep.sgd import SynchronousSGD
from lockstep.training import evaluate, lay_out

# What --fast takes for flags that are not given: the accuracy of ten classic epochs, sooner.
FAST: dict[str, dict[str, Any]] = {
    "mnist": {"epochs": 2, "batch_size": 128, "lr": 0.12, "momentum": 0.9},
    "sample": {"epochs": 10, "lr": 0.1, "momentum": 0.9},
}


@dataclass(frozen=True)
class Settings(Classic):
    allreduce: str = flag("auto", "how gradients are summed", ("auto", *NAMES))
    compress: str | None = flag(None, "send fewer bytes: bf16, fp16, powersgd[:RANK], topk[:SHARE]")
    fast: bool = flag(False, "one cycle of the learning rate, up to a larger --lr, few epochs")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compress is not None:
            compress.parse(self.compress)


def main(argv: Sequence[str] | None = None) -> int:
    settings = parse(Settings, argv, __doc__, lambda s: FAST[s.data] if s.fast else {})
    with settings.session() as world:
        if done_already(world, settings.run):
            return 0
        device = settings.choose_device(world)
        torch.manual_seed(settings.seed)
        model, layout, facts = lay_out(ConvNet(), settings, device)
        loaded = load(world, settings.data, settings.data_dir)
        images, test = (part.to(device, layout) for part in loaded)
        initial = deepcopy(model)
        journal = Journal("sync_sgd", settings, world, len(images), **facts)
        train(model, images, test, settings, journal)
        journal.end(proofs(model, initial, images, settings, world, allreduce=settings.allreduce))
    return 0


def train(
    model: nn.Module, images: Images, test: Images, settings: Settings, journal: Journal
) -> None:
    world = journal.world
    sgd = SynchronousSGD(
        model,
        world,
        lr=settings.lr,
        momentum=settings.momentum,
        allreduce=settings.allreduce,
        compress=settings.compress,
    )
    schedule = schedule_of(sgd, settings, steps(len(images), settings.batch_size, world))
    torch.manual_seed(settings.seed + world.rank)  # each rank drops other units

    for epoch in range(1, settings.epochs + 1):
        model.train()
        journal.start_epoch()
        shards = batches(len(images), settings.batch_size, world, settings.seed, epoch)
        for number, batch in enumerate(shards):
            x, y = images.batch(batch.indices)
            sgd.zero_grad()
            loss = F.nll_loss(model(x), y)
            if len(y):
                sgd.backward(loss, examples=len(y))
                sgd.step()
            else:  # at the end of an epoch the others may have some left
                sgd.step(examples=0)
            schedule.step()
            journal.step(epoch, number, batch, loss)
        journal.epoch(
            epoch,
            lambda: evaluate(model, test, settings.test_batch_size, world),
            waited=sgd.communication_seconds,
        )
    if (it := sgd.gradients.compressor) is not None:
        journal.say(f"{settings.compress}: {it.sent} bytes sent by a rank; --verify is without it")


def schedule_of(sgd: SynchronousSGD, settings: Settings, steps_an_epoch: int) -> LRScheduler:
    """Return the learning rate over the run: constant, or one cycle (L. Smith, 2018)."""
    if not settings.fast:
        return LambdaLR(sgd, lambda _: 1.0)
    return OneCycleLR(
        sgd, settings.lr, settings.epochs * steps_an_epoch, cycle_momentum=False, pct_start=0.2
    )


if __name__ == "__main__":
    lockstep.run(main)
