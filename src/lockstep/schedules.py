"""The learning rate over a run: a factor of the highest one, a pure function of the step.

A run that goes on from a checkpoint needs nothing but the number of the step.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch.optim.lr_scheduler import LambdaLR

NAMES = ("none", "onecycle", "cosine")
# Where one cycle begins and ends, as shares of its peak: those of torch's OneCycleLR.
_FIRST, _LAST = 1 / 25, 1 / 250_000
# The part of a run in which one cycle rises, if nothing else is asked for.
_RISE = 0.3


def factor(name: str, step: int, total: int, warmup: int = 0) -> float:
    """Return the learning rate of a step as a share of the highest. Local.

    Args:
        name: "none": constant; "cosine": half a cosine down to 0 (I. Loshchilov, F. Hutter, "SGDR",
            2017); "onecycle": up and down again by half cosines (L. Smith, N. Topin,
            "Super-convergence", 2018).
        step: number of steps done before this one, 0 or more; behind the end the last factor holds.
        total: steps of the whole run, 1 or more.
        warmup: steps until the highest is reached, by a straight line (P. Goyal et al., "Accurate,
            large minibatch SGD", 2017); for one cycle the steps of its rise, 0 for 3 of 10.

    Raises:
        KeyError: no such name.
    """
    if name == "onecycle":
        warmup = warmup or max(1, round(_RISE * total))
    if step < warmup:
        if name == "onecycle":
            return _half_cosine(_FIRST, 1.0, step / warmup)
        return (step + 1) / (warmup + 1)
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    last = {"none": 1.0, "cosine": 0.0, "onecycle": _LAST}[name]
    return _half_cosine(1.0, last, done)


def schedule(
    optimizer: torch.optim.Optimizer, name: str, *, total: int, warmup: int = 0, done: int = 0
) -> LambdaLR:
    """Return a schedule that follows `factor`; its ``step()`` is called after each step. Local.

    Args:
        optimizer: its learning rates are the highest.
        name, total, warmup: see `factor`.
        done: number of steps done, for a run that goes on.
    """
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return LambdaLR(optimizer, partial(_of_step, name, total, warmup), last_epoch=done - 1)


def _of_step(name: str, total: int, warmup: int, step: int) -> float:
    return factor(name, step, total, warmup)


def _half_cosine(first: float, last: float, share: float) -> float:
    return last + (first - last) * (1 + math.cos(math.pi * share)) / 2
