"""A training that is asked to leave saves, ends with a code of its own, and goes on later."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from launching import Program, need
from lockstep.interrupt import LEFT_EARLY
from lockstep.waiting import wait_until

PROGRAM = str(Path(__file__).parent / "programs" / "training.py")
START, LIMIT = 90.0, 120.0
RUN = "run"


def start(name: str, directory: Path, *arguments: str) -> Program:
    """Start the training on three ranks."""
    mpi = need(name)
    return Program(mpi.command(3, PROGRAM, RUN, *arguments), mpi.environment(), directory)


def wait_for_checkpoint(program: Program, directory: Path, beyond: int = 0) -> None:
    """Wait until a checkpoint of a later step than this is there."""

    def is_there() -> bool:
        names = [path.stem for path in (directory / RUN).glob("*.pt")]
        return any(int(name.rpartition("-")[2]) > beyond for name in names)

    assert wait_until(is_there, START), program.text()


def weights(directory: Path) -> bytes:
    """Return the bytes of the last weights."""
    return (directory / RUN / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("openmpi", signal.SIGUSR1),
        ("openmpi", signal.SIGUSR2),
        ("openmpi", signal.SIGTERM),
        ("mpich", signal.SIGUSR2),
        ("impi", signal.SIGTERM),
    ],
    ids=str,
)
def test_a_signal_to_one_rank(tmp_path: Path, name: str, number: signal.Signals) -> None:
    """At whatever moment, and again while it is leaving: all leave after the same step, by 85."""
    program = start(name, tmp_path, "1000000", "0.005")
    program.wait_for("begins after step 0", 3, START)
    wait_for_checkpoint(program, tmp_path)
    (pid,) = re.findall(r"rank 2 is (\d+)", program.text())
    os.kill(int(pid), number)
    os.kill(int(pid), number)
    outcome = program.finish(LIMIT)
    assert outcome.code == LEFT_EARLY, str(outcome)
    left = re.findall(r"rank (\d) leaves after step (\d+)", outcome.text)
    assert sorted(rank for rank, _ in left) == ["0", "1", "2"], str(outcome)
    assert len({step for _, step in left}) == 1, str(outcome)
    assert f"asked to leave by {number.name} on rank 2" in outcome.text, str(outcome)
    saved = sorted((tmp_path / RUN).glob("*.pt"))
    assert saved[-1].name.endswith(f"-step-{left[0][1]}.pt"), str(outcome)


def test_it_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    """Stopped by a file, killed, then finished: the weights of the unbroken run, bit for bit."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    outcome = start("openmpi", whole, "60").finish(LIMIT)
    assert outcome.code == 0, str(outcome)
    program = start("openmpi", broken, "60", "0.02")
    program.wait_for("begins after step 0", 3, START)
    (broken / RUN / "STOP").touch()
    outcome = program.finish(LIMIT)
    assert outcome.code == LEFT_EARLY, str(outcome)
    assert not (broken / RUN / "STOP").exists()
    stopped = int(re.findall(r"leaves after step (\d+)", outcome.text)[0])
    assert stopped < 60
    program = start("openmpi", broken, "60", "0.02")
    program.wait_for(f"begins after step {stopped}", 3, START)
    wait_for_checkpoint(program, broken, beyond=stopped)
    for pid in re.findall(r"rank \d is (\d+)", program.text()):
        os.kill(int(pid), signal.SIGKILL)
    assert program.finish(LIMIT).code not in (0, LEFT_EARLY)
    outcome = start("openmpi", broken, "60").finish(LIMIT)
    assert outcome.code == 0, str(outcome)
    again = int(re.findall(r"begins after step (\d+)", outcome.text)[0])
    assert stopped < again < 60
    assert not list((broken / RUN).glob(".*.part"))
    assert weights(broken) == weights(whole)
