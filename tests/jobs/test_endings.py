"""However a rank ends, the whole job ends in seconds, with a code and a word on why."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest

from launching import Launcher, Outcome, Program, need

PROGRAMS = Path(__file__).parent / "programs"
# Seconds to start Python and torch on all ranks, on a machine that others use as well.
START = 90.0
# Seconds from the event to the end of the launcher.
END = 5.0

MPIS = pytest.mark.parametrize("name", ["openmpi", "mpich", "impi"])


def run(mpi: Launcher, program: str, how: str, directory: Path, ranks: int = 3) -> Outcome:
    """Run a program; fail if more than END seconds pass between its event and its end."""
    command = mpi.command(ranks, str(PROGRAMS / program), how)
    started = Program(command, mpi.environment(), directory)
    outcome = started.finish(START)
    ended = time.time()
    assert not outcome.timed_out, str(outcome)
    events = [float(at) for at in re.findall(r"event (\d+\.\d+)", outcome.text)]
    if events:
        took = ended - max(events)
        assert took < END, f"{took:.1f} s from the event to the end; {outcome}"
    return outcome


@MPIS
@pytest.mark.parametrize("how", ["raise", "exit", "exit-text", "code", "kill", "interrupt"])
def test_one_rank_ends(name: str, how: str, tmp_path: Path) -> None:
    """The others wait in an all_reduce with a limit of 60 s; nobody waits for that."""
    outcome = run(need(name), "endings.py", how, tmp_path)
    assert outcome.code != 0, str(outcome)
    said = {
        "raise": r"\[rank 2 of 3, .*\] Traceback[\s\S]*ValueError: boom on purpose",
        "exit": r"\[rank 2 of 3, .*leaves with code 3",
        "exit-text": "boom on purpose",
        "code": r"\[rank 2 of 3, .*leaves with code 4",
        "kill": "",
        "interrupt": r"\[rank 2 of 3, .*interrupted",
    }[how]
    assert re.search(said, outcome.text), str(outcome)


@MPIS
def test_one_rank_never_comes(name: str, tmp_path: Path) -> None:
    """After the timeout of 1 s the verdict names the verb, and the job ends."""
    outcome = run(need(name), "endings.py", "absent", tmp_path)
    assert outcome.code != 0, str(outcome)
    assert "CollectiveTimeout: all_reduce #2 (float32[1], SUM)" in outcome.text, str(outcome)


@MPIS
def test_all_ranks_end_with_one_code(name: str, tmp_path: Path) -> None:
    """A planned end is no crash: the launcher returns the code, nobody is aborted."""
    outcome = run(need(name), "endings.py", "all", tmp_path)
    assert outcome.code == 85, str(outcome)
    assert "ending the job" not in outcome.text
    assert "Traceback" not in outcome.text


@MPIS
def test_ctrl_c(name: str, tmp_path: Path) -> None:
    """SIGINT to the launcher, as a terminal sends it."""
    mpi = need(name)
    command = mpi.command(3, str(PROGRAMS / "endings.py"), "wait")
    program = Program(command, mpi.environment(), tmp_path)
    program.wait_for("waiting", 3, START)
    program.process.send_signal(signal.SIGINT)
    sent = time.time()
    outcome = program.finish(START)
    assert not outcome.timed_out, str(outcome)
    assert outcome.code != 0, str(outcome)
    assert time.time() - sent < END, str(outcome)


@MPIS
def test_an_exception_in_a_plain_script(name: str, tmp_path: Path) -> None:
    """A script that does not use lockstep.run ends as well: traceback first."""
    outcome = run(need(name), "plain.py", "raise", tmp_path)
    assert outcome.code != 0, str(outcome)
    assert "ValueError: boom on purpose" in outcome.text, str(outcome)


def test_a_killed_plain_script(tmp_path: Path) -> None:
    """Without a chance to say anything."""
    assert run(need("openmpi"), "plain.py", "kill", tmp_path).code != 0


@MPIS
@pytest.mark.parametrize("how", ["unfinished", "destroyed"])
def test_leaving_with_works_under_way(name: str, how: str, tmp_path: Path) -> None:
    """Works that nobody waits for do not keep the processes from ending well."""
    outcome = run(need(name), "plain.py", how, tmp_path)
    assert outcome.code == 0, str(outcome)


@MPIS
def test_leaving_with_a_work_that_cannot_end(name: str, tmp_path: Path) -> None:
    """One rank never called the verb: the others leave after its timeout of 2 s."""
    mpi = need(name)
    command = mpi.command(3, str(PROGRAMS / "pending.py"))
    outcome = Program(command, mpi.environment(), tmp_path).finish(START)
    ended = time.time()
    assert not outcome.timed_out, str(outcome)
    event = max(float(at) for at in re.findall(r"event (\d+\.\d+)", outcome.text))
    assert ended - event < 2 * 2 + END, str(outcome)


@pytest.mark.parametrize(("name", "backend"), [("openmpi", "gloo"), ("mpich", "mpi")])
def test_stopped_before_the_end_of_mpi(name: str, backend: str, tmp_path: Path) -> None:
    """MPI_Finalize would wait for it for ever: after the session's timeout the job is ended."""
    mpi = need(name)
    command = mpi.command(3, str(PROGRAMS / "parting.py"), backend, "3")
    outcome = Program(command, mpi.environment(), tmp_path).finish(START)
    assert not outcome.timed_out, str(outcome)
    assert outcome.code != 0, str(outcome)
    said = re.findall(r"lockstep: rank (\d) \(.*\) is stopped .* since 3 s", outcome.text)
    assert said == ["1"], str(outcome)
