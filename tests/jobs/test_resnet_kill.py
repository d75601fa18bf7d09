"""Fifty times SIGKILL to all ranks, at random moments of one run that saves every few steps."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

from resnet_runs import (
    assert_same_bits,
    begin,
    good,
    kill,
    last_step,
    make_pictures,
    measured,
    records,
    run,
    wait_for_step,
)

KILLS, EVERY, STEPS = 50, 3, 1200
FLAGS = (
    *("--data", "imagefolder", "--width", 2, "--batch-size", 8, "--epochs", 1000, "--augment"),
    *("--max-steps", STEPS, "--schedule", "onecycle", "--lr", 0.01, "--deterministic"),
    *("--save-steps", EVERY, "--keep", 2, "--log-interval", 1),
)


def test_fifty_kills(tmp_path: Path) -> None:
    """Each start goes on from the last checkpoint but one at the worst; the end is the same.

    Steps are short, so that many kills come while a checkpoint is written. Some come before the
    first step: while a checkpoint is read, or while ranks are still starting.
    """
    data = make_pictures(tmp_path / "data", train=40)  # small: 50 starts are to be short
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    flags = (*FLAGS, "--data-dir", data)
    once = (*flags, "--run", whole, "--export", tmp_path / "whole.st")
    good(run(2, tmp_path, *once, limit=900.0), whole)
    again = (*flags, "--run", killed, "--export", tmp_path / "killed.st")
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    chance = random.Random(seed)
    reached = 0
    for number in range(KILLS):
        known = len(records(killed))
        program = begin(2, tmp_path, *again, name="killed")
        if number % 10 == 9:
            program.wait_for("lockstep: backend mpi", 1, 120.0)  # then models, data, checkpoint
        else:
            wait_for_step(program, killed, reached + chance.randrange(1, 20), known)
        time.sleep(chance.uniform(0.0, 0.03))
        kill(program)
        assert not (killed / "DONE").exists(), "the run was too short for so many kills"
        check_resumed(records(killed)[known:], reached)
        reached = max(reached, last_step(killed))
    good(run(2, tmp_path, *again, name="end", limit=900.0), killed)
    assert_same_bits(tmp_path / "whole.st", tmp_path / "killed.st")
    assert measured(killed) == measured(whole)
    assert not list((killed / "checkpoints").glob(".*.part"))


def check_resumed(found: list[dict[str, Any]], reached: int) -> None:
    """Nothing is lost but what came after a checkpoint; the last one may not have been whole."""
    for step in (it["global_step"] for it in found if it["kind"] == "start"):
        assert step % EVERY == 0
        assert step >= (reached // EVERY - 1) * EVERY
    steps = [it["global_step"] for it in found if it["kind"] == "step"]
    assert steps == list(range(steps[0], steps[0] + len(steps))) if steps else True
    if steps and reached >= 2 * EVERY:
        assert steps[0] - 1 >= (reached // EVERY - 1) * EVERY
