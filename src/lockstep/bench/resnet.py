"""Compare the ways to train the residual network, a step at a time, in one run at equal ranks.

Start it as ``mpirun -np 2 python -m lockstep.bench.resnet`` on a machine that does nothing else.
The tutorial's way: a DataLoader that makes each picture a PIL image, crops and flips it, makes it a
tensor and normalises it; DistributedDataParallel over gloo; the default memory format. The others
take their batches from one tensor, crop and flip whole batches, and step as jobs/resnet_ddp.py
does. The pictures are noise, which takes as long as any others.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import lockstep
from lockstep.bench.measure import Sample, compare_within, surroundings
from lockstep.course import draw
from lockstep.data import Images, batches
from lockstep.data.augment import crop_and_flip
from lockstep.models import ResNet
from lockstep.steps import AllReduceStep, DistributedStep
from lockstep.world import World

Call = Callable[[], object]
Part = tuple[torch.Tensor, torch.Tensor]
MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
_LR = 1e-3


@dataclass(frozen=True)
class Options:
    """What is compared: see the flags."""

    width: int
    batch_size: int
    images: int
    workers: int


@dataclass(frozen=True)
class Way:
    """A way to train; by default that of the job with no flags, over the backend mpi."""

    sync: type = DistributedStep
    channels_last: bool = False
    bf16: bool = False
    compiled: bool = False


WAYS = {
    "tensors, DDP over mpi": Way(),
    "tensors, all-reduce by hand": Way(sync=AllReduceStep),
    "channels_last": Way(channels_last=True),
    "bf16": Way(bf16=True),
    "compiled": Way(compiled=True),
    "channels_last, compiled": Way(channels_last=True, compiled=True),
}
TUTORIAL, TUTORIAL_INPUT, INPUT = "tutorial", "input alone: tutorial", "input alone: tensors"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the root prints. Collective."""
    names = [TUTORIAL, TUTORIAL_INPUT, INPUT, *WAYS]
    parser = argparse.ArgumentParser(prog="lockstep.bench.resnet", description=__doc__)
    parser.add_argument("--width", type=int, default=16, help="of the network; 64 is the whole one")
    parser.add_argument("--batch-size", type=int, default=128, help="images a rank and step")
    parser.add_argument("--images", type=int, default=5000, help="size of the set")
    parser.add_argument("--workers", type=int, default=0, help="of the tutorial's DataLoader")
    parser.add_argument("--seconds", type=float, default=30.0, help="for each contender, about")
    parser.add_argument("--without", nargs="*", default=[], choices=names, help="leave these out")
    parser.add_argument("--json", type=Path, help="write the samples here too")
    flags = parser.parse_args(argv)
    options = Options(flags.width, flags.batch_size, flags.images, flags.workers)
    with lockstep.session(backend="mpi", timeout=600) as world:
        calls = {name: _contender(name, options, world) for name in names}
        calls = {name: call for name, call in calls.items() if name not in flags.without}
        for call in calls.values():
            call()  # compiles, lays out buckets, starts workers
        samples = compare_within(world, calls, flags.seconds * len(calls))
        if world.rank == 0:
            _print(world, samples, options)
            if flags.json:
                rows = {name: asdict(sample) for name, sample in samples.items()}
                record = {**surroundings(world), **asdict(options), "samples": rows}
                flags.json.write_text(json.dumps(record, indent=1))
    return 0


def _contender(name: str, options: Options, world: World) -> Call:
    if name in WAYS:
        return _ours(WAYS[name], options, world)
    if name == INPUT:
        source = _tensors(options, world, channels_last=False)
        return lambda: next(source)
    pictures = _tutorial_input(options, world)
    return (lambda: next(pictures)) if name == TUTORIAL_INPUT else _tutorial(pictures, options)


def _noise(options: Options) -> Images:
    generator = torch.Generator().manual_seed(1)
    shape = (options.images, 3, 32, 32)
    pixels = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    labels = torch.randint(10, (options.images,), generator=generator)
    return Images(pixels, labels, MEAN, DEVIATION, tuple("0123456789"))


def _tensors(options: Options, world: World, channels_last: bool) -> Iterator[Part]:
    """Yield full batches of whole epochs as the job does, without end."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    images, epoch, step = _noise(options).to(torch.device("cpu"), layout), 0, 0
    while True:
        shards = batches(len(images), options.batch_size, world, 1, epoch)
        full = (shard for shard in shards if shard.total == options.batch_size * world.size)
        for _, x, y in images.take(full):
            yield crop_and_flip(x, draw(1, world.rank, step)), y
            step += 1
        epoch += 1


def _ours(way: Way, options: Options, world: World) -> Call:
    """Return a step of the job."""
    torch.manual_seed(1)
    layout = torch.channels_last if way.channels_last else torch.contiguous_format
    anything: Any = ResNet(options.width)
    model = anything.to(memory_format=layout)
    step = way.sync(
        model,
        torch.optim.Adam(model.parameters(), lr=_LR),
        world,
        loss=partial(F.cross_entropy, reduction="sum"),
        amp=torch.bfloat16 if way.bf16 else None,
        compiled=way.compiled,
    )
    source = _tensors(options, world, way.channels_last)
    total = options.batch_size * world.size
    return lambda: step.step([next(source)], total)


class _Pictures(Dataset[tuple[torch.Tensor, int]]):
    """The pictures one by one, as torchvision's CIFAR10 gives them with the usual transforms."""

    def __init__(self, images: Images) -> None:
        from torchvision import transforms

        self._pixels = images.images.permute(0, 2, 3, 1).contiguous().numpy()
        self._labels = images.labels.tolist()
        self._transform = transforms.Compose(
            [
                transforms.RandomCrop(32, padding=4),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize(MEAN, DEVIATION),
            ]
        )

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        from PIL import Image

        return self._transform(Image.fromarray(self._pixels[index])), self._labels[index]


def _tutorial_input(options: Options, world: World) -> Iterator[Part]:
    pictures = _Pictures(_noise(options))
    sampler: DistributedSampler[Any] = DistributedSampler(
        pictures, num_replicas=world.size, rank=world.rank
    )
    loader = DataLoader(
        pictures,
        options.batch_size,
        sampler=sampler,
        num_workers=options.workers,
        drop_last=True,
        persistent_workers=options.workers > 0,
        # a process that runs MPI must not be forked
        multiprocessing_context="forkserver" if options.workers else None,
    )
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def _tutorial(source: Iterator[Part], options: Options) -> Call:
    """Return a step of the tutorial's loop."""
    torch.manual_seed(1)
    gloo: Any = dist.new_group(backend="gloo")
    ddp = DistributedDataParallel(ResNet(options.width), process_group=gloo)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=_LR)

    def step() -> None:
        x, y = next(source)
        optimizer.zero_grad()
        F.cross_entropy(ddp(x), y).backward()
        optimizer.step()

    return step


def _print(world: World, samples: dict[str, Sample], options: Options) -> None:
    print(f"ResNet of width {options.width}, batch {options.batch_size} a rank, Adam")
    print("  ".join(f"{key}: {value}" for key, value in surroundings(world).items()))
    print(
        f"{'a step, slowest rank':28} {'median ms':>10} {'quartiles':>22} {'n':>4} "
        f"{'images/s a rank':>16} {'times':>6}"
    )
    first = samples.get(TUTORIAL)
    for name, s in samples.items():
        spread = f"{s.low * 1e3:.1f} to {s.high * 1e3:.1f}"
        alone = name in (INPUT, TUTORIAL_INPUT)
        times = f"{first.median / s.median:.2f}" if first and not alone else ""
        print(
            f"{name:28} {s.median * 1e3:>10.1f} {spread:>22} {s.n:>4} "
            f"{options.batch_size / s.median:>16.1f} {times:>6}"
        )
    print("times: faster than the tutorial's loop")
    trained = [samples[name].median for name in WAYS if name in samples]
    if trained and INPUT in samples:
        ratio = min(trained) / samples[INPUT].median
        print(f"the input alone is {ratio:.0f} times as fast as the fastest of these steps")


if __name__ == "__main__":
    lockstep.run(main)
