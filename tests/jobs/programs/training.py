"""A training that can be stopped and killed at any step: training.py DIRECTORY STEPS [PAUSE].

It saves every third step, prints what it did, and writes its last weights beside its run.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import lockstep
from lockstep.checkpoint import (
    Checkpoints,
    export,
    load_model,
    load_optimizer,
    restore_random,
)
from lockstep.interrupt import LEFT_EARLY, Interrupts
from lockstep.sgd import synchronous


def main(argv: Sequence[str] | None = None) -> int:
    directory, steps = Path(sys.argv[1]), int(sys.argv[2])
    pause = float(sys.argv[3]) if len(sys.argv) > 3 else 0.0
    with (
        lockstep.session(backend="mpi", timeout=60) as world,
        Interrupts(world, directory, 60.0) as interrupts,
    ):
        torch.manual_seed(world.rank)
        model = nn.Sequential(nn.Linear(20, 300), nn.Dropout(0.5), nn.Linear(300, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        with Checkpoints(world, directory, every_steps=3, keep=2, timeout=60) as checkpoints:
            sgd, first = synchronous(optimizer, world), 0
            if state := checkpoints.resume():
                load_model(model, state["model"])
                load_optimizer(optimizer, state["optimizer"])
                restore_random(state["random"])
                first = state["steps"]
            print(f"rank {world.rank} is {os.getpid()}, begins after step {first}", flush=True)
            for step in range(first + 1, steps + 1):
                x = torch.rand(8, 20)
                sgd.zero_grad()
                sgd.backward(F.mse_loss(model(x), x.sum(dim=1, keepdim=True)), examples=8)
                sgd.step()
                time.sleep(pause)
                decision = interrupts.agree(save_due=checkpoints.due(step))
                if decision.save:
                    checkpoints.save(
                        step,
                        {
                            "model": model.state_dict(),
                            "optimizer": optimizer.state_dict(),
                            "steps": step,
                        },
                    )
                if decision.stop:
                    break
        if decision.stop:
            print(f"rank {world.rank} leaves after step {step}", flush=True)
            return LEFT_EARLY
        export(model, directory / "model.safetensors", world)
        print(f"rank {world.rank} is done", flush=True)
    return 0


if __name__ == "__main__":
    lockstep.run(main)
