"""Where a run is, and how it goes on from a checkpoint, also on another number of ranks."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from lockstep.checkpoint import load_model, load_optimizer, restore_random
from lockstep.data import steps
from lockstep.errors import CheckpointError
from lockstep.world import World


@dataclass(frozen=True)
class Course:
    """Where a run begins or goes on.

    Attributes:
        share: images that a rank takes for a step.
        an_epoch: steps of an epoch.
        epoch: the one to train, from 1.
        done: steps of this epoch that are done.
        total_done: steps of the run that are done.
    """

    share: int
    an_epoch: int
    epoch: int = 1
    done: int = 0
    total_done: int = 0

    def start(self, epoch: int) -> int:
        """Return how many steps of an epoch are done. Local."""
        return self.done if epoch == self.epoch else 0


def begin_or_go_on(
    state: Mapping[str, Any] | None,
    share: int,
    images: int,
    world: World,
    say: Callable[[str], None],
) -> Course:
    """Return the course of a run, from its begin or from a checkpoint. Local, equal on all ranks.

    On another number of ranks the batch of all ranks stays what it was, if it can be shared out
    evenly; otherwise it changes, the place in the epoch is kept in images, and that is said.

    Args:
        state: what the checkpoint holds: epoch, step, global_step, global_batch, share, images,
            ranks; None to begin.
        share: images that a rank is to take for a step, by the settings.
        images: of an epoch.
        world: the ranks.
        say: gets a line on each change.

    Raises:
        CheckpointError: the checkpoint is of a set with another number of images.
    """
    if state is None:
        return Course(share, steps(images, share, world))
    if state["images"] != images:
        raise CheckpointError(
            f"the checkpoint is of a run on {state['images']} images, this one has {images}",
            needed="the same images",
            cure="give the same --data and --data-dir, or another --run, or --resume none",
        )
    batch = state["global_batch"]
    if share == state["share"] and batch % world.size == 0:
        share = batch // world.size  # as asked for then, whatever the number of ranks was
    mine, an_epoch = share * world.size, steps(images, share, world)
    if world.size != state["ranks"]:
        say(
            f"resume: {world.size} ranks in place of {state['ranks']}: {share} images a rank and "
            f"step, {mine} on all ranks" + (" as before" if mine == batch else "")
        )
    if mine == batch:
        return Course(share, an_epoch, state["epoch"], state["step"], state["global_step"])
    return _with_another_batch(state, Course(share, an_epoch, state["epoch"]), mine, say)


def _with_another_batch(
    state: Mapping[str, Any], course: Course, batch: int, say: Callable[[str], None]
) -> Course:
    """Find the place in the epoch by the number of images that were seen."""
    seen = min(state["step"] * state["global_batch"], state["images"])
    done = course.an_epoch if seen == state["images"] else seen // batch
    say(
        f"resume: a step takes {batch} images on all ranks, before {state['global_batch']}; in "
        f"epoch {course.epoch}, {max(0, seen - done * batch)} images are seen again"
    )
    return replace(course, done=done, total_done=(course.epoch - 1) * course.an_epoch + done)


def restore(model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Take over model, optimizer and random states; numbers such as lr stay the optimizer's. Local.

    Args:
        model, optimizer: as they were made from the settings.
        state: from `Checkpoints.resume`, with "model" and "optimizer".

    Raises:
        CheckpointError: they are others than those that were saved; the model may be changed.
    """
    numbers = [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    load_model(model, state["model"])
    load_optimizer(optimizer, state["optimizer"])
    for group, own in zip(optimizer.param_groups, numbers, strict=True):
        group.update(own)
    restore_random(state["random"])


def kept(course: Course, settings: Any, images: int, world: World) -> dict[str, Any]:
    """Return what a checkpoint holds besides the place and what was trained. Local.

    Args:
        course: of the run.
        settings: a dataclass with `share`, the images that a rank was to take for a step.
        images: of an epoch.
        world: the ranks.
    """
    return {
        "global_batch": course.share * world.size,
        "share": settings.share,
        "images": images,
        "ranks": world.size,
        "settings": asdict(settings),
        "versions": {"python": platform.python_version(), "torch": str(torch.__version__)},
    }


def differences(state: Mapping[str, Any], settings: Any) -> str:
    """Name the settings that are not those of a checkpoint, "" if there are none. Local.

    Args:
        state: what the checkpoint holds.
        settings: a dataclass.
    """
    before = state["settings"]
    changed = [
        f"{name} {before[name]} -> {value}"
        for name, value in asdict(settings).items()
        if name in before and str(before[name]) != str(value)
    ]
    return ", ".join(changed)


def draw(seed: int, rank: int, step: int) -> torch.Generator:
    """Return random numbers that depend on nothing but these three, to be gone on with. Local."""
    words = np.random.SeedSequence((seed, rank, step)).generate_state(2)
    return torch.Generator().manual_seed(int(words[0]) << 31 ^ int(words[1]))
