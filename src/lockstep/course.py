"""Where a run is, and how it goes on from a checkpoint, also on another number of ranks."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from lockstep.checkpoint import load_model, load_optimizer, restore_random
from lockstep.data import steps
from lockstep.errors import CheckpointError
from lockstep.logbook import Logbook
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
        sums: what the logbook of this rank has summed up in the epoch; None for nothing.
        seconds: of training so far.
        remarks: what a reader of the log should know.
    """

    share: int
    an_epoch: int
    epoch: int = 1
    done: int = 0
    total_done: int = 0
    sums: list[float] | None = None
    seconds: float = 0.0
    remarks: tuple[str, ...] = ()

    def start(self, epoch: int) -> tuple[int, list[float] | None]:
        """Return how many steps of an epoch are done, and their sums. Local."""
        return (self.done, self.sums) if epoch == self.epoch else (0, None)

    def announce(self, log: Logbook, settings: Any) -> None:
        """Tell the logbook of a run how it begins or goes on. Local."""
        for line in (str(settings), *self.remarks):
            log.say(line)
        if self.remarks:
            log.resumed(self.total_done, self.seconds)

    def last(self, total: int) -> int:
        """Return the epoch in which a run of so many steps ends. Local."""
        return -(-total // self.an_epoch)


def begin_or_go_on(
    state: Mapping[str, Any] | None, settings: Any, images: int, world: World
) -> Course:
    """Return the course of a run, from its begin or from a checkpoint. Local, equal on all ranks.

    On another number of ranks the batch of all ranks stays what it was, if it can be shared out
    evenly; otherwise it changes, the place in the epoch is kept in images, and that is remarked.

    Args:
        state: of the checkpoint: "source"; "own", with "sums"; what `kept` returns; "seconds"; and
            the place: epoch, step of it, global_step. None to begin.
        settings: a dataclass with `share`, the images that a rank is to take for a step, and
            `total_steps`, which gives those of the run for those of an epoch.
        images: of an epoch.
        world: the ranks.

    Raises:
        CheckpointError: the checkpoint is of a set with another number of images, of another kind
            of job, or of a step behind the end that the settings give the run.
    """
    share = settings.share
    if state is None:
        return Course(share, steps(images, share, world))
    _require_images(_require(state, _PLACE)["images"], images)
    batch, remarks = state["global_batch"], [f"resume: from {state['source']}"]
    if changed := differences(state, settings):
        remarks.append(f"resume: other settings than then: {changed}")
    if share == state["share"] and batch % world.size == 0:
        share = batch // world.size  # as asked for then, whatever the number of ranks was
    mine, an_epoch = share * world.size, steps(images, share, world)
    if world.size != state["ranks"]:
        remarks.append(_other_ranks(state, world.size, share))
    course = Course(share, an_epoch, state["epoch"], state["step"], state["global_step"])
    if mine != batch:
        course, remark = _with_another_batch(state, course, mine)
        remarks.append(remark)
    _require_left(course.total_done, settings.total_steps(an_epoch), str(state["source"]))
    sums = (state["own"] or {}).get("sums")
    return replace(course, sums=sums, seconds=state["seconds"], remarks=tuple(remarks))


# What a checkpoint has besides what was trained: `kept`, the place, and what `resume` adds.
_PLACE = ["images", "global_batch", "share", "ranks", "settings", "seconds", "own"]
_PLACE += ["epoch", "step", "global_step"]


def _require(state: Mapping[str, Any], names: Sequence[str]) -> Mapping[str, Any]:
    """Return the state; refuse what another kind of job has saved."""
    if missing := [name for name in names if name not in state]:
        raise CheckpointError(
            f"{state.get('source')} lacks {', '.join(missing)}: it is of another kind of job",
            needed="a checkpoint that this job has written",
            cure="name another with --resume, or --resume none",
        )
    return state


def _require_left(done: int, total: int, source: str) -> None:
    if done > total:
        raise CheckpointError(
            f"{source} is of step {done}, and the run is to end with step {total}",
            needed="a run that is at least as long",
            cure="a larger --epochs or --max-steps, an earlier checkpoint, or --resume none",
        )


def _require_images(then: int, now: int) -> None:
    if then != now:
        raise CheckpointError(
            f"the checkpoint is of a run on {then} images, this one has {now}",
            needed="the same images",
            cure="give the same --data and --data-dir, or another --run, or --resume none",
        )


def _other_ranks(state: Mapping[str, Any], size: int, share: int) -> str:
    same = " as before" if share * size == state["global_batch"] else ""
    return (
        f"resume: {size} ranks in place of {state['ranks']}: {share} images a rank and "
        f"step, {share * size} on all ranks{same}"
    )


def _with_another_batch(state: Mapping[str, Any], course: Course, batch: int) -> tuple[Course, str]:
    """Find the place in the epoch by the number of images that were seen."""
    seen = min(state["step"] * state["global_batch"], state["images"])
    done = course.an_epoch if seen == state["images"] else seen // batch
    total = (course.epoch - 1) * course.an_epoch + done
    return replace(course, done=done, total_done=total), (
        f"resume: a step takes {batch} images on all ranks, before {state['global_batch']}; in "
        f"epoch {course.epoch}, {max(0, seen - done * batch)} images are seen again"
    )


def restore(model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Take over model, optimizer and random states; numbers such as lr stay the optimizer's. Local.

    Args:
        model, optimizer: as they were made from the settings.
        state: from `Checkpoints.resume`, with "model" and "optimizer".

    Raises:
        CheckpointError: they are others than those that were saved; the model may be changed.
    """
    _require(state, ("model", "optimizer", "random"))
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
