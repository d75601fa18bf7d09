"""Train the MNIST network in step on all ranks, by torch's DistributedDataParallel.

    mpirun -np 4 python jobs/mnist_ddp.py
    mpirun -np 2 python jobs/mnist_ddp.py --data mnist --backend gloo --init-method file:///shared/dir

Each rank takes its own part of every batch; DDP averages the gradients over the ranks while
backward still runs; then all take the same step. The flags are those of the classic PyTorch MNIST
script; jobs/sync_sgd.py does the same by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lockstep
from lockstep.data import Images, batches, load
from lockstep.journal import Journal
from lockstep.metrics import done_already
from lockstep.models import ConvNet
from lockstep.proof import communication_share, joint_loss, proofs
from lockstep.settings import Classic, parse
from lockstep.training import evaluate, lay_out


@dataclass(frozen=True)
class Settings(Classic):
    pass


def main(argv: Sequence[str] | None = None) -> int:
    settings = parse(Settings, argv, __doc__)
    with settings.session() as world:
        if done_already(world, settings.run):
            return 0
        device = settings.choose_device(world)
        torch.manual_seed(settings.seed)
        model, layout, facts = lay_out(ConvNet(), settings, device)
        loaded = load(world, settings.data, settings.data_dir)
        images, test = (part.to(device, layout) for part in loaded)
        initial = deepcopy(model)
        journal = Journal("mnist_ddp", settings, world, len(images), **facts)
        ddp = train(model, images, test, settings, journal)
        share = communication_share(ddp, images, settings, world)
        journal.end(proofs(model, initial, images, settings, world), share)
    return 0


def train(
    model: nn.Module, images: Images, test: Images, settings: Settings, journal: Journal
) -> DistributedDataParallel:
    world = journal.world
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    sgd = torch.optim.SGD(ddp.parameters(), lr=settings.lr, momentum=settings.momentum)
    torch.manual_seed(settings.seed + world.rank)  # each rank drops other units

    for epoch in range(1, settings.epochs + 1):
        ddp.train()
        journal.start_epoch()
        shards = batches(len(images), settings.batch_size, world, settings.seed, epoch)
        for number, batch in enumerate(shards):
            x, y = images.batch(batch.indices)
            sgd.zero_grad()
            loss = joint_loss(ddp(x), y, batch.total, world.size)
            loss.backward()
            sgd.step()
            journal.step(epoch, number, batch, loss)
        journal.epoch(epoch, lambda: evaluate(model, test, settings.test_batch_size, world))
    return ddp


if __name__ == "__main__":
    lockstep.run(main)
