"""Bad input: one clear error, the same end on all ranks, nothing overwritten."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from resnet_runs import LIMIT, good, make_pictures, refused, run

from launching import Program, need

QUICK = ("--width", 2, "--batch-size", 10, "--epochs", 1, "--max-steps", 3)


def tree(directory: Path) -> dict[str, bytes]:
    """Return all files below a directory, but for locks."""
    files = (path for path in directory.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path): path.read_bytes() for path in files}


def no_train(data: Path) -> str:
    """Leave nothing to train with."""
    shutil.rmtree(data / "train")
    return "train"


def another_class(data: Path) -> str:
    """Test a class that is not trained."""
    (data / "test" / "owl").rename(data / "test" / "emu")
    return "emu"


def empty_class(data: Path) -> str:
    """Train a class without pictures."""
    shutil.rmtree(data / "train" / "owl")
    (data / "train" / "owl").mkdir()
    return "owl"


def truncated(data: Path) -> str:
    """Cut off the end of a picture."""
    path = data / "train" / "dog" / "0003.jpg"
    path.write_bytes(path.read_bytes()[:-200])
    return str(path)


@pytest.mark.parametrize("harm", [no_train, another_class, empty_class, truncated])
def test_harmed_pictures(harm: object, tmp_path: Path) -> None:
    """The error names what is wrong; the directory of the run holds no checkpoint."""
    data = make_pictures(tmp_path / "data")
    name = harm(data)  # type: ignore[operator]
    before = tree(data)
    flags = ["--data", "imagefolder", "--data-dir", data, "--run", tmp_path / "run"]
    refused(run(2, tmp_path, *flags, *QUICK), "DataError", name)
    assert tree(data) == before
    assert not list(tmp_path.rglob("checkpoint-*"))


def test_a_truncated_picture_that_is_not_kept(tmp_path: Path) -> None:
    """It is found by the worker of one rank, in the middle of training."""
    data = make_pictures(tmp_path / "data")
    name = truncated(data)
    flags = ["--data", "imagefolder", "--data-dir", data, "--in-memory", "no", "--workers", 1]
    outcome = run(2, tmp_path, *flags, *QUICK, "--epochs", 2, "--max-steps", 20)
    refused(outcome, "DataError", name)


def test_no_data(tmp_path: Path) -> None:
    """No such directory."""
    flags = ["--data", "imagefolder", "--data-dir", tmp_path / "nowhere"]
    refused(run(2, tmp_path, *flags, *QUICK), "DataError", "nowhere")


@pytest.mark.parametrize("odd", ["--data synthetic", "--lr 0.5 --optimizer sgd", "--max-steps 2"])
def test_ranks_with_different_flags(odd: str, tmp_path: Path) -> None:
    """Rank 1 was told something else than rank 0: they would train different models."""
    mpi = need("openmpi")
    flags = ["--data", "sample", *map(str, QUICK), "--run-dir", str(tmp_path / "runs")]
    first = mpi.command(1, *_job(*flags))
    second = mpi.command(1, *_job(*flags, *odd.split()))[1:]
    outcome = Program([*first, ":", *second], mpi.environment(), tmp_path).finish(LIMIT)
    assert not outcome.timed_out, outcome
    refused(outcome, "SettingsError", "rank 1", *odd.split()[::2])
    assert not (tmp_path / "runs").exists()


def test_a_run_directory_that_cannot_be_made(tmp_path: Path) -> None:
    """There is a file of that name, which stays as it is."""
    (tmp_path / "file").write_text("mine\n")
    for flag, path in (("--run", tmp_path / "file"), ("--run-dir", tmp_path / "file" / "runs")):
        refused(run(2, tmp_path, "--data", "sample", *QUICK, flag, path), "Error", str(path))
    assert (tmp_path / "file").read_text() == "mine\n"


def test_a_checkpoint_of_another_run(tmp_path: Path) -> None:
    """Of another model, another set, another optimizer; damaged; none: the run stays as it is."""
    kept = tmp_path / "run"
    flags = ["--data", "sample", *QUICK]
    good(run(2, tmp_path, *flags, "--run", kept), kept)
    saved = kept / "checkpoints"
    before = tree(kept)
    cut = tmp_path / "cut.pt"
    cut.write_bytes(max(saved.glob("*.pt")).read_bytes()[:-1000])
    for number, (what, words) in enumerate(
        (
            (["--resume", saved, "--width", 3], ("CheckpointError", "another model", "--width")),
            (
                ["--resume", saved, "--data", "synthetic"],
                ("CheckpointError", "4000 images", "10000"),
            ),
            (
                ["--resume", saved, "--optimizer", "sgd"],
                ("CheckpointError", "another optimizer", "--optimizer"),
            ),
            (["--resume", saved, "--max-steps", 2], ("CheckpointError", "of step 3", "step 2")),
            (["--resume", cut], ("Damaged", str(cut), "cut off")),
            (["--resume", tmp_path / "none.pt"], ("Error", "none.pt")),
        )
    ):
        other = tmp_path / f"other-{number}"
        outcome = run(2, tmp_path, *flags, "--run", other, *what)
        refused(outcome, *words)
        assert not (other / "DONE").exists()
        assert not list(other.rglob("checkpoint-*"))
    assert tree(kept) == before


def test_an_export_that_would_overwrite(tmp_path: Path) -> None:
    """Before the training, not after it."""
    mine = tmp_path / "thesis.safetensors"
    mine.write_text("mine\n")
    outcome = run(2, tmp_path, "--data", "sample", *QUICK, "--export", mine)
    refused(outcome, "StorageError", str(mine))
    assert mine.read_text() == "mine\n"
    assert '"kind": "step"' not in "".join(
        path.read_text() for path in tmp_path.rglob("metrics.jsonl")
    )


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of two megabytes."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "lockstep-test", str(path)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small file system cannot be mounted here; needs root")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True, timeout=30)


def test_a_full_disk(small_disk: Path, tmp_path: Path) -> None:
    """The job ends; the checkpoints from before are whole, and the run goes on where there is room.

    Width 6 makes checkpoints of 1 MB: beside the first there is no room for a second one.
    """
    kept = small_disk / "run"
    flags = ["--data", "sample", "--width", 6, "--batch-size", 10, "--epochs", 1]
    flags += ["--max-steps", 9, "--save-steps", 3, "--log-interval", 1]
    outcome = run(2, tmp_path, *flags, "--run", kept)
    refused(outcome, "StorageError", str(kept), "No space left on device")
    assert not (kept / "DONE").exists()
    (checkpoint,) = (kept / "checkpoints").glob("checkpoint-*")
    assert not list(kept.rglob("*.part"))
    room = tmp_path / "room"
    outcome = good(run(2, tmp_path, *flags, "--run", room, "--resume", checkpoint), room)
    assert checkpoint.name in outcome.text


def _job(*flags: str) -> tuple[str, ...]:
    from resnet_runs import JOB

    return (JOB, *flags)
