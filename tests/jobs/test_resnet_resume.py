"""Stop and resume: as if nothing had been, to the last bit."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest
from resnet_runs import (
    LEFT_EARLY,
    LIMIT,
    assert_same_bits,
    begin,
    good,
    last_step,
    make_pictures,
    measured,
    records,
    run,
    send,
    wait_for_step,
)

# 4,000 digits: 27 steps of 150 images an epoch, the last one short.
COMMON = (
    *("--data", "sample", "--width", 2, "--epochs", 3, "--augment", "--deterministic"),
    *("--schedule", "onecycle", "--label-smoothing", 0.1, "--lr", 0.01, "--log-interval", 1),
)
STEPS = 3 * 27
WAYS = {
    # gloo, since it adds up in an order that depends on where in a bucket a number lies
    "ddp": (3, "--batch-size", 50, "--backend", "gloo", "--optimizer", "adamw"),
    "allreduce": (2, "--batch-size", 25, "--accumulate", 3, "--sync", "allreduce"),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_same_bits(way: str, tmp_path: Path) -> None:
    """Stopped at random steps by each signal, on any rank, and by the file; resumed each time."""
    ranks, *flags = WAYS[way]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    flags = [*COMMON, *flags]
    once = [*flags, "--export", tmp_path / "whole.safetensors", "--run", whole]
    good(run(ranks, tmp_path, *once), whole)
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    chance = random.Random(seed)
    again = [*flags, "--export", tmp_path / "stopped.safetensors", "--run", stopped]
    ways = ["SIGUSR1", "SIGUSR2", "SIGTERM", "STOP"]
    for count, how in enumerate(ways, start=1):
        known = len(records(stopped))
        program = begin(ranks, tmp_path, *again, name=how)
        share = STEPS * count // (len(ways) + 1)
        wait_for_step(program, stopped, chance.randint(share - 8, share + 8), known)
        if how == "STOP":
            (stopped / "STOP").touch()
        else:
            rank = chance.randrange(ranks)
            send(program, signal.Signals[how], rank)
            send(program, signal.Signals[how], rank)  # a second one does no harm
        outcome = program.finish(LIMIT)
        if last_step(stopped) == STEPS and how == "STOP":
            break  # the file is looked for once a second; the run was faster
        assert outcome.code == LEFT_EARLY, outcome
        assert not (stopped / "DONE").exists()
        assert not (tmp_path / "stopped.safetensors").exists()
    if not (stopped / "DONE").exists():
        good(run(ranks, tmp_path, *again, name="end"), stopped)
    assert_same_bits(tmp_path / "whole.safetensors", tmp_path / "stopped.safetensors")
    assert measured(stopped) == measured(whole)
    assert len(measured(whole)) == 3


def test_other_numbers_of_ranks(tmp_path: Path) -> None:
    """From 2 to 3 and to 1: the batch of all ranks is kept if it can be; if not, that is said."""
    flags = [*COMMON, "--batch-size", 30, "--run", tmp_path / "run"]
    program = begin(2, tmp_path, *flags, name="two")
    wait_for_step(program, tmp_path / "run", 20)
    send(program, signal.SIGUSR2, 1)
    assert program.finish(LIMIT).code == LEFT_EARLY
    known = len(records(tmp_path / "run"))
    program = begin(3, tmp_path, *flags, name="three")
    wait_for_step(program, tmp_path / "run", 40, known)
    send(program, signal.SIGTERM, 2)
    outcome = program.finish(LIMIT)
    assert outcome.code == LEFT_EARLY, outcome
    assert "3 ranks in place of 2: 20 images a rank and step, 60 on all ranks as before" in (
        outcome.text
    )
    outcome = good(run(1, tmp_path, *flags, "--batch-size", 35, name="one"), tmp_path / "run")
    assert "a step takes 35 images on all ranks, before 60" in outcome.text
    assert "batch_size 30 -> 35" in outcome.text
    rows = measured(tmp_path / "run")
    assert [row[0] for row in rows] == ["1", "2", "3"]
    assert float(rows[-1][2]) > 50.0


def test_pictures_that_are_not_kept(tmp_path: Path) -> None:
    """Workers decode ahead of the step at which a run is stopped; nothing is lost or doubled."""
    data = make_pictures(tmp_path / "data", train=40)
    flags = ["--data", "imagefolder", "--data-dir", data, "--in-memory", "no", "--workers", 1]
    flags += ["--width", 2, "--batch-size", 5, "--epochs", 4, "--deterministic", "--augment"]
    flags += ["--log-interval", 1]
    for name in ("whole", "stopped"):
        again = [*flags, "--run", tmp_path / name, "--export", tmp_path / f"{name}.safetensors"]
        if name == "stopped":
            program = begin(2, tmp_path, *again, name=name)
            wait_for_step(program, tmp_path / name, 17)
            send(program, signal.SIGUSR2, 0)
            assert program.finish(LIMIT).code == LEFT_EARLY
        good(run(2, tmp_path, *again, name=name), tmp_path / name)
    assert_same_bits(tmp_path / "whole.safetensors", tmp_path / "stopped.safetensors")
    assert measured(tmp_path / "stopped") == measured(tmp_path / "whole")
    steps = [it["global_step"] for it in records(tmp_path / "whole") if it["kind"] == "step"]
    assert steps == list(range(1, 49))


def test_longer_with_other_numbers(tmp_path: Path) -> None:
    """A run that is done is not begun again; without DONE it goes on, with the new flags."""
    flags = [*COMMON, "--batch-size", 75, "--run", tmp_path / "run", "--schedule", "none"]
    good(run(2, tmp_path, *flags, "--max-steps", 5), tmp_path / "run")
    outcome = run(2, tmp_path, *flags, "--max-steps", 9)
    assert outcome.code == 0, outcome
    assert f"The run in {tmp_path / 'run'} is DONE. To" in outcome.text, outcome
    assert "step 9" not in outcome.text, outcome
    (tmp_path / "run" / "DONE").unlink()
    outcome = good(run(2, tmp_path, *flags, "--max-steps", 9, "--lr", 0.5), tmp_path / "run")
    assert "lr 0.01 -> 0.5" in outcome.text
    steps = [it["global_step"] for it in records(tmp_path / "run") if it["kind"] == "step"]
    assert steps == list(range(1, 10))
