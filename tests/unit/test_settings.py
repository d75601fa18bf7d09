"""Settings of a job: flags, defaults, checks."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass
from pathlib import Path

import pytest

from lockstep.errors import SettingsError
from lockstep.settings import Classic, flag, parse


@dataclass(frozen=True)
class Settings(Classic):
    """Those of a job, with one flag of its own."""

    fast: bool = flag(False, "fewer epochs")


def presets(settings: Settings) -> dict[str, object]:
    """Return what --fast brings."""
    return {"epochs": 2, "lr": 0.1} if settings.fast else {}


def test_the_defaults_of_the_classic_script() -> None:
    """Nothing given: those of the PyTorch example."""
    found = parse(Settings, [], None)
    assert (found.batch_size, found.test_batch_size, found.epochs) == (64, 1000, 10)
    assert (found.lr, found.momentum, found.seed, found.log_interval) == (0.01, 0.5, 1, 10)
    assert (found.no_cuda, found.world_size, found.data) == (False, None, "sample")
    assert found == Settings()


def test_flags() -> None:
    """Each field is one; its type is the field's."""
    text = "--batch-size 8 --no-cuda --world-size 3 --data-dir x --group-name a --lr 1e-3"
    found = parse(Settings, text.split(), None)
    assert (found.batch_size, found.no_cuda, found.world_size) == (8, True, 3)
    assert (found.data_dir, found.group_name, found.lr) == (Path("x"), "a", 1e-3)
    with pytest.raises(FrozenInstanceError):
        found.lr = 1.0  # type: ignore[misc]


def test_presets_change_defaults_only() -> None:
    """What was given stays, also if it is the default."""
    assert parse(Settings, ["--fast"], None, presets).epochs == 2
    assert parse(Settings, ["--fast", "--epochs", "10"], None, presets).epochs == 10
    assert parse(Settings, [], None, presets).epochs == 10


@pytest.mark.parametrize(
    "wrong",
    [
        "--unknown 1",
        "--batch-size 0",
        "--batch-size many",
        "--epochs -1",
        "--momentum 1",
        "--lr 0",
        "--lr nan",
        "--seed -1",
        "--verify -1",
        "--data cifar",
        "--backend mpich",
        "--group-name a/b",
        "--no-cuda --backend nccl",
        "--device cuda --backend mpi",
    ],
)
def test_wrong_flags(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The job ends with code 2 and names the flag or its value."""
    with pytest.raises(SystemExit) as caught:
        parse(Settings, wrong.split(), None)
    assert caught.value.code == 2
    assert wrong.split(maxsplit=1)[0].removeprefix("--").split("-")[0] in capsys.readouterr().err


def test_checked_when_made() -> None:
    """Also without a command line."""
    with pytest.raises(SettingsError, match="--batch-size 0"):
        Settings(batch_size=0)


@dataclass(frozen=True)
class Sized(Settings):
    """With a flag that has a smallest value."""

    width: int = flag(4, "channels", least=1)


@pytest.mark.parametrize(
    "words", [["--width", "0"], ["--width", "-1"], ["--run", ""], ["--data-dir", ""]]
)
def test_too_small_or_empty(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Below the smallest value; a path from a variable that is not set."""
    with pytest.raises(SystemExit):
        parse(Sized, words, None)
    assert words[0] in capsys.readouterr().err
    assert parse(Sized, ["--width", "1", "--run", "."], None).run == Path(".")
