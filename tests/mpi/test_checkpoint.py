"""Save and resume on all ranks: bit for bit, at other numbers of ranks, and when the disk fails."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import nn
from torch.nn import functional as F

from lockstep import World
from lockstep.checkpoint import (
    Checkpoints,
    export,
    load_model,
    load_optimizer,
    random_state,
    restore_random,
)
from lockstep.errors import CheckpointError, SettingsError, StorageError
from lockstep.sgd import synchronous


@pytest.fixture
def shared(tmp_path: Path, comm: MPI.Intracomm) -> Path:
    """Return one directory for all ranks."""
    return comm.bcast(tmp_path, root=0)


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


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("stop", [1, 6, 11])
def test_stop_and_resume_is_the_unbroken_run(
    world: World, shared: Path, stop: int, asynchronous: bool
) -> None:
    """Every bit of every weight and statistic, on every rank."""
    whole = Training(world)
    for _ in range(12):
        whole.step()
    first = Training(world)
    with Checkpoints(world, shared / "c", asynchronous=asynchronous) as checkpoints:
        assert checkpoints.resume() is None
        for _ in range(stop):
            first.step()
        checkpoints.save(stop, first.state())
        for _ in range(3):  # what is saved is a copy: these steps leave no trace
            first.step()
    second = Training(world)
    second.begin_random_numbers(7)
    with Checkpoints(world, shared / "c") as checkpoints:
        state = checkpoints.resume()
        assert state is not None
        assert state["steps"] == stop
        second.resume(state)
        for _ in range(12 - stop):
            second.step()
    for found, expected in zip(second.weights(), whole.weights(), strict=True):
        assert torch.equal(found, expected)
