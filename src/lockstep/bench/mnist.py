"""Compare the ways to train the MNIST network, a step at a time, in one run at equal ranks.

Start it as ``mpirun -np 2 python -m lockstep.bench.mnist`` on a machine that does nothing else. The
classic way is the loop of PyTorch's MNIST example: a DataLoader that makes each image a PIL image,
then a tensor, then normalises it; DistributedDataParallel over gloo; the default memory format. The
others take their batches from one tensor and lie in memory as channels_last.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import lockstep
from lockstep.allreduce import ALGORITHMS
from lockstep.bench.measure import Sample, compare, surroundings
from lockstep.data import Images, batches, load
from lockstep.data.digits import DEVIATION, MEAN
from lockstep.errors import counted
from lockstep.models import ConvNet
from lockstep.sgd import SynchronousSGD
from lockstep.world import World

Step = Callable[[], object]
LR, MOMENTUM = 0.01, 0.5
APART = "classic, no communication", "tensors, no communication"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the root prints. Collective."""
    parser = argparse.ArgumentParser(prog="lockstep.bench.mnist", description=__doc__)
    parser.add_argument("--batch-size", type=int, default=64, help="images a rank takes at a step")
    parser.add_argument("--steps", type=int, default=24, help="steps of each contender in a turn")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each contender")
    parser.add_argument("--data", choices=("sample", "mnist"), default="sample")
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--json", type=Path, help="write the samples here too")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    with lockstep.session(backend="mpi") as world:
        images, _ = load(world, options.data, options.data_dir)
        images = images.to(torch.device("cpu"), torch.channels_last)
        contenders, waited = _contenders(images, options.batch_size, world)
        samples = compare(world, contenders, calls=options.steps, rounds=options.rounds)
        # The quarter of the steps that warms up has been waited for too.
        steps = (options.steps + max(1, options.steps // 4)) * options.rounds
        mine = torch.tensor([seconds() / steps for seconds in waited.values()])
        dist.all_reduce(mine)
        means = dict(zip(waited, (mine / world.size).tolist(), strict=True))
        if world.rank == 0:
            _print(world, samples, means, options.batch_size)
            if options.json:
                record = {
                    **surroundings(world),
                    "batch_size": options.batch_size,
                    "samples": {name: asdict(sample) for name, sample in samples.items()},
                    "waited_seconds_a_step": means,
                }
                options.json.write_text(json.dumps(record, indent=1))
    return 0


def _contenders(
    images: Images, batch_size: int, world: World
) -> tuple[dict[str, Step], dict[str, Callable[[], float]]]:
    """Return a step of each way to train; and of those that know it, the seconds they waited."""
    gloo: Any = dist.new_group(backend="gloo")
    steps = {
        "classic: DataLoader, DDP over gloo": _classic(images, batch_size, world, gloo, True),
        APART[0]: _classic(images, batch_size, world, gloo, False),
        "tensors, DDP over gloo": ddp_step(images, batch_size, world, gloo, True),
        "tensors, DDP over mpi": ddp_step(images, batch_size, world, None, True),
        APART[1]: ddp_step(images, batch_size, world, None, False),
    }
    waited: dict[str, Callable[[], float]] = {}
    for algorithm in ("auto", *ALGORITHMS):
        name = f"sync_sgd, {algorithm}"
        steps[name], sgd = sync_sgd_step(images, batch_size, world, algorithm)
        waited[name] = _reader(sgd)
    return steps, waited


def _reader(sgd: SynchronousSGD) -> Callable[[], float]:
    return lambda: sgd.communication_seconds


class _Pictures(Dataset[tuple[torch.Tensor, int]]):
    """The digits one by one, as torchvision's MNIST gives them with the classic transforms."""

    def __init__(self, images: Images) -> None:
        from torchvision import transforms

        self._images = images
        normalize = transforms.Normalize((MEAN,), (DEVIATION,))
        self._transform = transforms.Compose([transforms.ToTensor(), normalize])

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        from PIL import Image

        image = self._images.images[index, 0].numpy()
        label = int(self._images.labels[index])
        return self._transform(Image.fromarray(image, mode="L")), label


def _classic(
    images: Images, batch_size: int, world: World, group: Any, together: bool
) -> Callable[[], object]:
    """Return a step of the classic script."""
    pictures = _Pictures(images)
    sampler: DistributedSampler[Any] = DistributedSampler(
        pictures, num_replicas=world.size, rank=world.rank
    )
    loader = DataLoader(pictures, batch_size, sampler=sampler, drop_last=True)

    def endless() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        epoch = 0
        while True:
            sampler.set_epoch(epoch)
            yield from loader
            epoch += 1

    return _step(DistributedDataParallel(ConvNet(), process_group=group), endless(), together)


def ddp_step(
    images: Images, batch_size: int, world: World, group: Any, together: bool
) -> Callable[[], object]:
    """Return a step of DDP on whole batches. Collective.

    Args:
        images: the training set.
        batch_size: images a rank takes.
        world: the ranks.
        group: of DDP; None for the default one.
        together: False to leave the communication out.
    """
    model: Any = ConvNet().to(memory_format=torch.channels_last)
    ddp = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
    return _step(ddp, _endless(images, batch_size, world), together)


def _step(
    ddp: DistributedDataParallel,
    source: Iterator[tuple[torch.Tensor, torch.Tensor]],
    together: bool,
) -> Callable[[], object]:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LR, momentum=MOMENTUM)

    def step() -> None:
        x, y = next(source)
        optimizer.zero_grad()
        with nullcontext() if together else ddp.no_sync():
            F.nll_loss(ddp(x), y).backward()
        optimizer.step()

    return step


def sync_sgd_step(
    images: Images, batch_size: int, world: World, algorithm: str
) -> tuple[Callable[[], object], SynchronousSGD]:
    """Return a step of the SGD written by hand, and the SGD. Collective.

    Args:
        images, batch_size, world: as for `ddp_step`.
        algorithm: how it sums gradients.
    """
    model: Any = ConvNet().to(memory_format=torch.channels_last)
    sgd = SynchronousSGD(model, world, lr=LR, momentum=MOMENTUM, allreduce=algorithm)
    source = _endless(images, batch_size, world)

    def step() -> None:
        x, y = next(source)
        sgd.zero_grad()
        sgd.backward(F.nll_loss(model(x), y), examples=len(y))
        sgd.step()

    return step, sgd


def _endless(
    images: Images, batch_size: int, world: World
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield full batches of whole epochs, without end."""
    epoch = 0
    while True:
        for batch in batches(len(images), batch_size, world, 1, epoch):
            if batch.total == batch_size * world.size:
                yield images.batch(batch.indices)
        epoch += 1


def _print(
    world: World, samples: dict[str, Sample], waited: dict[str, float], batch_size: int
) -> None:
    """Print a table; the share of communication is what a step takes more than without any."""
    ranks = f"{counted(world.size, 'rank')} on {counted(world.nodes, 'node')}"
    print(f"MNIST ConvNet, batch {batch_size} a rank, {ranks}")
    print("  ".join(f"{key}: {value}" for key, value in surroundings(world).items()))
    classic = next(iter(samples.values())).median
    print(
        f"{'a step, slowest rank':36} {'median ms':>9} {'quartiles':>15} {'n':>5} {'images/s':>9} "
        f"{'times':>6} {'communication':>14} {'waited':>7}"
    )
    for name, s in samples.items():
        apart = samples[APART[0] if name.startswith("classic") else APART[1]].median
        share = "" if name in APART else f"{max(0.0, 1 - apart / s.median):.0%}"
        waiting = f"{waited[name] / s.median:.0%}" if name in waited else ""
        spread = f"{s.low * 1e3:.2f} to {s.high * 1e3:.2f}"
        print(
            f"{name:36} {s.median * 1e3:>9.2f} {spread:>15} {s.n:>5} "
            f"{world.size * batch_size / s.median:>9.0f} {classic / s.median:>6.2f} "
            f"{share:>14} {waiting:>7}"
        )
    print(
        "times: faster than the classic way; communication: share by which a step is longer than "
        "without any;\nwaited: share in which SGD by hand saw its own thread wait"
    )


if __name__ == "__main__":
    lockstep.run(main)
