"""A signal on one rank, or a file, stops all ranks at the end of the same step."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from mpi4py import MPI

import lockstep
from lockstep.errors import CollectiveTimeout
from lockstep.interrupt import SIGNALS, Decision, Interrupts

GO_ON, SAVE, LEAVE = Decision(False, False), Decision(False, True), Decision(True, True)


@pytest.fixture
def own(comm: MPI.Intracomm) -> Iterator[lockstep.World]:
    """Return a world of this test's own: what a failed agreement leaves behind stays in it."""
    world = lockstep.discover(comm)
    old = {number: signal.getsignal(number) for number in SIGNALS}
    yield world
    for number, handler in old.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize("times", [1, 2])
def test_one_rank_is_signalled(
    own: lockstep.World,
    number: signal.Signals,
    times: int,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """All stop at that step, whichever rank it was; a second signal changes nothing."""
    last = own.size - 1
    with Interrupts(own, None, 20.0) as interrupts:
        for step in range(1, 100):
            if own.rank == last and step >= 7:
                for _ in range(times):
                    os.kill(os.getpid(), number)
            decision = interrupts.agree()
            if decision.stop:
                break
            assert decision == GO_ON
        assert step == 7
        assert decision == LEAVE
        os.kill(os.getpid(), number)
        assert interrupts.agree() == LEAVE
    os.kill(os.getpid(), number)  # while the process is leaving
    text = capfd.readouterr().out
    assert text == ("" if own.rank else f"asked to leave by {number.name} on rank {last}\n")


def test_all_ranks_are_signalled_at_any_time(own: lockstep.World) -> None:
    """From another thread, at moments of their own, while they wait in MPI: one common step."""
    with Interrupts(own, None, 20.0) as interrupts:
        timer = threading.Timer(0.05 * (own.rank + 1), os.kill, (os.getpid(), signal.SIGUSR2))
        timer.start()
        step = 0
        while not interrupts.agree().stop:
            own.comm.Barrier()
            step += 1
        timer.join()
        steps = own.comm.allgather(step)
    assert len(set(steps)) == 1


def test_handlers_are_restored(own: lockstep.World) -> None:
    """Those of before, if nobody has asked to stop; also after an exception."""
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))
    term = signal.getsignal(signal.SIGTERM)
    interrupts = Interrupts(own, None, 20.0)
    try:
        with interrupts:
            assert interrupts.agree() == GO_ON
            assert signal.getsignal(signal.SIGTERM) is not term
        assert signal.getsignal(signal.SIGTERM) is term
        with pytest.raises(ZeroDivisionError), interrupts:
            _ = 1 // 0
        assert signal.getsignal(signal.SIGTERM) is term
        os.kill(os.getpid(), signal.SIGUSR1)
        assert seen == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_one_rank_finds_a_checkpoint_due(own: lockstep.World) -> None:
    """Then all save, and go on."""
    with Interrupts(own, None, 20.0) as interrupts:
        assert interrupts.agree(save_due=own.rank == own.size - 1) == SAVE
        assert interrupts.agree() == GO_ON


def test_a_file_stops_all(
    own: lockstep.World, tmp_path: Path, comm: MPI.Intracomm, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whatever the launcher does with signals; it is obeyed once, then it is gone."""
    run = comm.bcast(tmp_path, root=0)
    with Interrupts(own, run, 20.0) as interrupts:
        assert interrupts.agree() == GO_ON
        if own.rank == own.size - 1:
            (run / "STOP").touch()
        steps = 0
        while not interrupts.agree().stop:
            steps += 1
            comm.Barrier()
        assert interrupts.agree() == LEAVE
    assert len(set(comm.allgather(steps))) == 1
    assert not (run / "STOP").exists()
    expected = "" if own.rank else f"asked to leave by {run / 'STOP'} on rank 0\n"
    assert capfd.readouterr().out == expected
    with Interrupts(own, run, 20.0) as interrupts:
        assert interrupts.agree() == GO_ON


@pytest.mark.ranks(2)
def test_a_rank_that_does_not_come(own: lockstep.World, comm: MPI.Intracomm) -> None:
    """The others hear of it within the limit."""
    with Interrupts(own, None, 0.5) as interrupts:
        if own.rank:
            with pytest.raises(CollectiveTimeout, match="at the end of a step"):
                interrupts.agree()
        comm.Barrier()
