"""A training that can be stopped after any step, for the tests of checkpoints."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from lockstep import World
from lockstep.checkpoint import (
    load_model,
    load_optimizer,
    restore_random,
)
from lockstep.sgd import synchronous


def paths(directory: Path) -> list[Path]:
    """Return the checkpoints of a directory, the oldest first."""
    return sorted(directory.glob("*.pt"))


class Training:
    """A small network with dropout, in step on all ranks, that can be stopped after any step."""

    def __init__(self, world: World) -> None:
        torch.manual_seed(5)
        self.world = world
        self.model = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3)
        )
        adam = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(adam, 0.05, total_steps=40)
        self.sgd = synchronous(adam, world, model=self.model)
        self.steps = 0
        self.begin_random_numbers(100 + world.rank)

    @staticmethod
    def begin_random_numbers(seed: int) -> None:
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)

    def step(self) -> None:
        """Take one step on data that all three sources of random numbers decide."""
        x = torch.rand(8, 6) + float(np.random.rand()) + random.random()
        y = torch.randint(3, (8,))
        self.sgd.zero_grad()
        self.sgd.backward(F.cross_entropy(self.model(x), y), examples=len(x))
        self.sgd.step()
        self.schedule.step()
        self.steps += 1

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.sgd.state_dict(),
            "schedule": self.schedule.state_dict(),
            "steps": self.steps,
        }

    def resume(self, state: dict[str, Any]) -> None:
        load_model(self.model, state["model"])
        load_optimizer(self.sgd, state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.steps = state["steps"]
        restore_random(state["random"])

    def weights(self) -> list[torch.Tensor]:
        return [tensor.clone() for tensor in self.model.state_dict().values()]
