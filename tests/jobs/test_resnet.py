"""jobs/resnet_ddp.py as a user starts it, with all its flags; other files stop and resume it."""

from __future__ import annotations

import json
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from resnet_runs import (
    LEFT_EARLY,
    LIMIT,
    begin,
    good,
    make_pictures,
    records,
    results,
    run,
    send,
    wait_for_step,
    weights,
)

SAMPLE = ("--data", "sample", "--width", 2)
# Each flag once; batches that are short in the end, and uneven between the ranks.
FLAGS = {
    "gloo-allreduce": (
        *(3, "--backend", "gloo", "--sync", "allreduce", "--optimizer", "adamw"),
        *("--schedule", "onecycle", "--warmup", 0.3, "--accumulate", 3, "--batch-size", 41),
        *("--augment", "--label-smoothing", 0.1, "--max-norm", 1.0, "--weight-decay", 0.01),
    ),
    "sgd-numerics": (
        *(2, "--optimizer", "sgd", "--nesterov", "--momentum", 0.8, "--schedule", "cosine"),
        *("--warmup", 0.5, "--channels-last", "--amp", "bf16", "--sync-batchnorm", "--lr", 0.1),
        *("--deterministic", "--test-batch-size", 333, "--batch-size", 99, "--tensorboard"),
    ),
    "one-rank": (1, "--batch-size", 256, "--save-steps", 4, "--keep", 2, "--accumulate", 2),
}


@pytest.mark.parametrize("name", FLAGS)
def test_flags(name: str, tmp_path: Path) -> None:
    """Two epochs; every test image counted once, whatever the ranks; all files are there."""
    ranks, *flags = FLAGS[name]
    where = tmp_path / "run"
    exported = tmp_path / "model.safetensors"
    more = ["--epochs", 2, "--run", where, "--export", exported, "--log-interval", 5]
    outcome = good(run(ranks, tmp_path, *SAMPLE, *flags, *more), where)
    assert "divergence between ranks 0.0" in outcome.text
    assert re.search(r"^rank 0 epoch 1 step 5/\d+ loss \d\.\d{4} \d+ images/s$", outcome.text, re.M)
    assert re.search(r"^Total: \d+\.\d+ s", outcome.text, re.M)
    rows = results(where)
    assert [row["epoch"] for row in rows] == ["1", "2"]
    assert list(rows[0])[:3] == ["epoch", "loss", "acc"]
    for row in rows:
        correct = float(row["acc"]) * 10  # of 1,000 images: a whole number of them
        assert correct == pytest.approx(round(correct), abs=1e-6)
    assert float(rows[1]["loss"]) < float(rows[0]["loss"]) < 2.5
    assert {"settings.json", "metrics.jsonl", "curves.png", "DONE"} <= {
        path.name for path in where.iterdir()
    }
    step = next(it for it in records(where) if it["kind"] == "step")
    assert {"time", "images_per_second", "communication_share", "global_step"} <= step.keys()
    assert json.loads((where / "settings.json").read_text())["settings"]["width"] == 2
    assert bool(list(where.rglob("events.out.tfevents*"))) == ("--tensorboard" in flags)
    assert 1 <= len(list((where / "checkpoints").glob("*.pt"))) <= 3
    assert all(tensor.isfinite().all() for tensor in weights(exported).values())


def test_both_syncs_agree(tmp_path: Path) -> None:
    """DDP and the all-reduce written by hand end with the same weights, but for rounding.

    A step moves weights by a hundredth; tests/mpi compares both in float64.
    """
    for sync in ("ddp", "allreduce"):
        flags = ["--optimizer", "sgd", "--lr", 0.01, "--max-steps", 4, "--batch-size", 20]
        flags += ["--sync", sync, "--export", tmp_path / sync, "--run", tmp_path / f"run-{sync}"]
        good(run(2, tmp_path, *SAMPLE, *flags), tmp_path / f"run-{sync}")
    first, second = weights(tmp_path / "ddp"), weights(tmp_path / "allreduce")
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, rtol=1e-3, atol=2e-4, msg=name)


def test_it_learns_pictures(tmp_path: Path) -> None:
    """Three colours in JPEG files, over 90 %; images/s and the score are printed."""
    data = make_pictures(tmp_path / "data", train=40, test=7)
    flags = ["--data", "imagefolder", "--data-dir", data, "--width", 4, "--batch-size", 10]
    outcome = good(
        run(2, tmp_path, *flags, "--epochs", 6, "--run", tmp_path / "run"), tmp_path / "run"
    )
    rows = results(tmp_path / "run")
    assert float(rows[-1]["acc"]) > 90.0, outcome
    correct = float(rows[-1]["acc"]) * 21 / 100
    assert correct == pytest.approx(round(correct), abs=1e-6)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler: g++")
def test_compiled(tmp_path: Path) -> None:
    """Some steps of kernels that torch makes, and a test."""
    flags = ["--compile", "--width", 1, "--batch-size", 8, "--max-steps", 4, "--data", "sample"]
    good(run(1, tmp_path, *flags, "--run", tmp_path / "run", limit=600.0), tmp_path / "run")


def test_a_signal_without_a_named_run(tmp_path: Path) -> None:
    """The run directory is a new one; code 85; the checkpoint is there."""
    flags = [*SAMPLE, "--batch-size", 20, "--log-interval", 1, "--run-dir", tmp_path / "runs"]
    program = begin(2, tmp_path, *flags)
    program.wait_for("rank 0 epoch 1 step 3/", 1, LIMIT)
    (where,) = (tmp_path / "runs").iterdir()
    wait_for_step(program, where, 4)
    send(program, signal.SIGTERM, 1)
    outcome = program.finish(LIMIT)
    assert outcome.code == LEFT_EARLY, outcome
    assert "asked to leave by SIGTERM on rank 1" in outcome.text
    assert len(list((where / "checkpoints").glob("checkpoint-*.pt"))) == 1


@pytest.mark.parametrize("wrong", ["--accumulate 0", "--lr -1", "--warmup -1", "--keep 0"])
def test_wrong_flags(wrong: str, tmp_path: Path) -> None:
    """Refused by name, before MPI is started."""
    outcome = run(1, tmp_path, *wrong.split(), MPI4PY_LIBMPI="/dev/null")
    assert outcome.code == 2, outcome
    assert wrong.split(maxsplit=1)[0] in outcome.text
