"""The flags of a training: how long, in which steps, by which optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from lockstep import schedules
from lockstep.settings.flags import Checked, flag


@dataclass(frozen=True)
class Optimization(Checked):
    """Length, batches, optimizer, learning rate, loss."""

    epochs: int = flag(100, "how often each image is seen")
    max_steps: int | None = flag(None, "end after so many steps, schedule included")
    batch_size: int = flag(128, "images a rank takes at a time")
    accumulate: int = flag(1, "such batches that a rank takes for one step")
    test_batch_size: int = flag(500, "images a rank tests at a time")
    sync: str = flag("ddp", "torch's DDP, or the sum written by hand", ("ddp", "allreduce"))
    optimizer: str = flag("adam", "as torch has them", ("sgd", "adam", "adamw"))
    lr: float = flag(1e-3, "the highest learning rate")
    momentum: float = flag(0.9, "of sgd, 0 to below 1")
    nesterov: bool = flag(False, "Nesterov's momentum for sgd")
    weight_decay: float = flag(0.0, "L2 penalty; decoupled from the gradient in adamw")
    max_norm: float | None = flag(None, "clip the joined gradient to this norm")
    schedule: str = flag("none", "the learning rate over the run", schedules.NAMES)
    warmup: float = flag(0.0, "epochs in which it rises; 0 for 3 of 10 with onecycle")
    label_smoothing: float = flag(0.0, "share of each label that goes to all classes")

    def __post_init__(self) -> None:
        """Refuse numbers that make no sense."""
        super().__post_init__()
        self._need_above_0("epochs", "batch_size", "accumulate", "test_batch_size", "lr")
        self._need_0_or_more("weight_decay", "warmup")
        for name in ("max_steps", "max_norm"):
            value = getattr(self, name)
            self._need(name, value is None or 0 < value < float("inf"), "above 0")
        self._need("momentum", 0 <= self.momentum < 1, "from 0 to below 1")
        self._need("nesterov", self.momentum > 0 or not self.nesterov, "--momentum above 0")
        self._need("label_smoothing", 0 <= self.label_smoothing < 1, "from 0 to below 1")

    @property
    def share(self) -> int:
        """Images that a rank takes for a step."""
        return self.batch_size * self.accumulate

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer of a model's parameters. Local."""
        common: dict[str, Any] = {"lr": self.lr, "weight_decay": self.weight_decay}
        if self.optimizer == "sgd":
            momentum, nesterov = self.momentum, self.nesterov
            return torch.optim.SGD(
                model.parameters(), momentum=momentum, nesterov=nesterov, **common
            )
        kind = torch.optim.Adam if self.optimizer == "adam" else torch.optim.AdamW
        return kind(model.parameters(), **common)

    def objective(self) -> dict[str, Any]:
        """Return what `lockstep.steps` is to be told of the loss and of clipping. Local."""
        loss = partial(F.cross_entropy, reduction="sum", label_smoothing=self.label_smoothing)
        return {"loss": loss, "max_norm": self.max_norm}

    def total_steps(self, an_epoch: int) -> int:
        """Return the number of steps of the run, given that of an epoch. Local."""
        whole = self.epochs * an_epoch
        return whole if self.max_steps is None else min(whole, self.max_steps)

    def rate(self, an_epoch: int) -> dict[str, Any]:
        """Return what `lockstep.schedules.schedule` is to be told, given the steps of an epoch."""
        warmup = round(self.warmup * an_epoch)
        return {"name": self.schedule, "total": self.total_steps(an_epoch), "warmup": warmup}
