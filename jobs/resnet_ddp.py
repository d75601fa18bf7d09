"""Train a residual network on CIFAR-10 in step on all ranks, through kills and restarts.

    mpirun -np 2 python jobs/resnet_ddp.py --data sample --width 4 --epochs 3
    srun python jobs/resnet_ddp.py --data imagefolder --data-dir /shared/cifar10 --run runs/7

Each rank takes its part of every batch; gradients are averaged by torch's DDP, or by an all-reduce
that is written out (--sync allreduce). With --run DIR, the same command goes on from the newest
checkpoint there. USR1, USR2, TERM, or a file DIR/STOP: all ranks save after the step and leave, 85.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch

import lockstep
from lockstep.checkpoint import Checkpoints, export
from lockstep.course import Course, begin_or_go_on, draw, kept, restore
from lockstep.data import ImageSet, batches, load_pictures
from lockstep.data.augment import crop_and_flip
from lockstep.interrupt import LEFT_EARLY, Interrupts
from lockstep.logbook import Logbook
from lockstep.metrics import done_already
from lockstep.models import ResNet
from lockstep.schedules import schedule
from lockstep.settings import Cluster, Numerics, Optimization, Pictures, Saving, flag, parse
from lockstep.sgd import divergence
from lockstep.steps import AllReduceStep, DistributedStep, Step, parts_of
from lockstep.training import evaluate


@dataclass(frozen=True)
class Settings(Cluster, Saving, Numerics, Optimization, Pictures):
    width: int = flag(64, "channels after the stem, which all others follow", least=1)
    log_interval: int = flag(50, "steps between two lines of progress")


def main(argv: Sequence[str] | None = None) -> int:
    settings = parse(Settings, argv, __doc__)
    with settings.session() as world:
        if done_already(world, settings.run, longer="give more --epochs"):
            return 0
        settings.make_deterministic()
        device = settings.choose_device(world)
        run = settings.run_directory(world, "resnet_ddp")
        with (
            Interrupts(world, run.path, settings.timeout) as stop,
            settings.checkpoints(world, run.path, settings.timeout) as store,
        ):
            both = load_pictures(world, settings.data, settings.data_dir, **settings.how())
            images, test = (part.to(device, settings.layout) for part in both)
            torch.manual_seed(settings.seed)
            model = settings.place(ResNet(settings.width, len(images.classes)), device)
            optimizer = settings.make_optimizer(model)
            torch.manual_seed(settings.seed + world.rank)  # each rank draws numbers of its own
            state = store.resume(settings.resume)
            course = begin_or_go_on(state, settings, len(images), world)
            if state:
                restore(model, optimizer, state)
            way = DistributedStep if settings.sync == "ddp" else AllReduceStep
            step = way(model, optimizer, world, **settings.objective(), **settings.numerics())
            shape = {"epochs": settings.epochs, "steps": course.an_epoch}
            with Logbook(world, run, interval=settings.log_interval, **shape) as log:
                course.announce(log, settings)
                if not train(step, images, test, settings, course, log=log, stop=stop, store=store):
                    log.leave(f"Saved; to go on: the same command with --run {run.path}")
                    return LEFT_EARLY
                store.wait()
                if settings.export:
                    export(model, settings.export, world, settings.timeout)
                log.end({"divergence between ranks": divergence(model, world)})
    return 0


def train(
    step: Step,
    images: ImageSet,
    test: ImageSet,
    settings: Settings,
    course: Course,
    *,
    log: Logbook,
    stop: Interrupts,
    store: Checkpoints,
) -> bool:
    """Train to the end, or until somebody asks to leave early; say whether it was the end."""
    world, seed, facts = step.world, settings.seed, kept(course, settings, len(images), step.world)
    done, total = course.total_done, settings.total_steps(course.an_epoch)
    rate = schedule(step.optimizer, **settings.rate(course.an_epoch), done=done)
    for epoch in range(course.epoch, course.last(total) + 1):
        step.module.train()
        start, sums = course.start(epoch)
        log.start_epoch(epoch, start, sums)
        shards = batches(len(images), course.share, world, seed, epoch, start=start)
        left = images.take(islice(shards, total - done))
        for number, (batch, x, y) in enumerate(left, start=start + 1):
            seen = crop_and_flip(x, draw(seed, world.rank, done)) if settings.augment else x
            parts = parts_of(seen, y, batch.total, world.size, settings.batch_size)
            loss = step.step(parts, batch.total)
            rate.step()
            done += 1
            place = {"epoch": epoch, "global_step": done}
            counts = {"number": number, "images": len(y), "total": batch.total}
            log.step(**place, **counts, loss=loss, waited=step.communication_seconds)
            now = stop.agree(save_due=store.due(done) or done == total)
            if now.save:
                whole = step.state_dict() | facts | place | {"step": number, "seconds": log.seconds}
                store.save(done, whole, own={"sums": log.sums()})
            if now.stop:
                return False
        score = evaluate(step.module, test, settings.test_batch_size, world)
        log.epoch(epoch, done, score.accuracy, score.loss)
    return True


if __name__ == "__main__":
    lockstep.run(main)
