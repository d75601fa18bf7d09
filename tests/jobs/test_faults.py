"""Faults in real training jobs: a rank goes wrong in its data, and the verdict says which and how.

By default each fault once with each MPI, by hand over one backend and by DDP over both; with
LOCKSTEP_TEST_FAULTS=all every combination.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from launching import ROOT, Outcome, Program, need

PROGRAM = str(ROOT / "tests" / "jobs" / "programs" / "faulty.py")
# Seconds to start Python and torch on all ranks, on a machine that others use as well.
START = 90.0
LIMIT = 5.0
# Seconds that the verdict may take beyond the limit, and as many again on a loaded machine.
MORE = 5.0 + 5.0
# Seconds until nothing is left of a job: a launcher that waits for nobody is given 15.
CLEAN = 25.0
MARK = "LOCKSTEP_TEST_MARK"

MPIS = ["openmpi", "mpich", "impi"]
FAULTS = ["kill", "stop", "raise", "exit", "skip", "verb", "shape", "loop"]
WAYS = [("sync_sgd", "mpi"), ("sync_sgd", "gloo"), ("mnist_ddp", "mpi"), ("mnist_ddp", "gloo")]

# Heads of verdicts after which the job ends.
HEAD = re.compile(
    r"lockstep: (?:.* has stood for its limit|.* cannot end|a rank is gone|a rank has left)"
)
BLAMED = re.compile(
    r"rank (\d+)(?: \([^)]+\))? (?:is gone|is stopped|has |called |is in )"
    r"|shapes differ.*: rank (\d+)"
)
# What takes time and proves nothing here.
QUICK = ["--epochs", "1", "--channels-last", "off"]
NAME = r"rank 1 \([^)]+\)"


@dataclass(frozen=True)
class Run:
    """A run with a fault.

    Attributes:
        outcome: how it ended.
        event: when it happened, in seconds of time.time.
        lines: each line that was printed, and how many seconds after the event that was seen.
        left: what was left of it in the end.
    """

    outcome: Outcome
    event: float
    lines: list[tuple[float, str]]
    left: list[int]

    def when(self, pattern: str) -> float:
        """Return when something was first said; fail if it never was."""
        text = "\n".join(line for _, line in self.lines)
        if (match := re.search(pattern, text)) is None:
            pytest.fail(f"not said: {pattern}\n{self.outcome}")
        return self.lines[text.count("\n", 0, match.start())][0]

    @property
    def blamed(self) -> set[int]:
        """The ranks that verdicts at an end blame."""
        found, inside = set(), False
        for _, line in self.lines:
            inside = bool(HEAD.match(line)) or (inside and line.startswith("  "))
            if inside and (match := BLAMED.search(line)):
                found.add(int(match[1] or match[2]))
        return found


def run(
    name: str, faults: str, way: tuple[str, str], directory: Path, *flags: str, **env: str
) -> Run:
    """Run a job with faults, and look at what it prints while it does."""
    mpi, (job, backend) = need(name), way
    command = mpi.command(3, PROGRAM, faults, str(ROOT / "jobs" / f"{job}.py"))
    command += ["--backend", backend, "--timeout", str(LIMIT), "--data", "sample", *flags]
    env = mpi.environment(**{MARK: str(directory)}, **env)
    program = Program(command, env, directory)
    seen: list[float] = []
    end = time.monotonic() + START
    running = True
    while running and time.monotonic() < end:
        running = program.process.poll() is None
        seen += [time.time()] * (program.text().count("\n") - len(seen))
        time.sleep(0.02)
    timed_out = running
    end = time.monotonic() + CLEAN
    while (left := list(_left(directory))) and time.monotonic() < end:
        time.sleep(0.1)
    outcome = program.finish(0.1)
    assert not timed_out, str(outcome)
    events = [float(at) for at in re.findall(r"event (\d+\.\d+)", outcome.text)]
    assert events, str(outcome)
    lines = outcome.text.split("\n")
    event = max(events)
    stamps = [at - event for at in seen] + [time.time() - event] * (len(lines) - len(seen))
    return Run(outcome, event, list(zip(stamps, lines, strict=True)), left)


def _left(directory: Path) -> Iterator[int]:
    """Find the processes that a run has left, by a variable that is its own."""
    mark = f"{MARK}={directory}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z" and mark in (entry / "environ").read_bytes().split(b"\0"):
                yield int(entry.name)
        except OSError:
            continue


def said(how: str, job: str, backend: str) -> tuple[str, bool]:
    """Return what has to be said of rank 1, and whether only at the limit."""
    match how:
        case "kill":
            return rf"{NAME} is gone \((SIGKILL, signal 9|killed)", False
        case "raise":
            return r"rank 1 of 3, [^\n]*Traceback|ValueError: boom on purpose", False
        case "exit":
            return rf"{NAME} (has left by |is gone \()exit code 3|rank 1 of 3.*leaves with", False
        case "stop":
            return rf"{NAME} is stopped \(SIGSTOP.*; last seen in ", True
    place = "faulty.py" if how != "skip" else f"{job}.py"
    if job == "sync_sgd":
        late = rf"{NAME} has not entered sum of gradients #\d+ of group sgd \({job}.py:\d+\); "
        call = "broadcast" if how == "verb" else "all_reduce"
        where = rf"it waits in {call} #\d+ of group 0 \([^)]*, " if how != "loop" else "it is in "
        return late + where + rf"{place}:\d+", True
    if how == "loop":
        return rf"{NAME} has not entered all_reduce #\d+ .*; it is in faulty.py:\d+", True
    # Over mpi this is found before any tensor is sent; gloo only waits.
    if how == "verb":
        text = rf"rank 1 called broadcast #\d+ \({place}:\d+\) where the others called all_r"
        return text, backend == "gloo"
    text = rf"shapes differ in all_reduce #\d+: rank 1 float\d+\[[37]\] \({place}:\d+\)"
    # gloo itself ends who has the shorter tensor
    crash = rf"|{NAME} is gone \(SIGABRT, signal 6\); last seen in \w+.py:\d+"
    return text + (crash if backend == "gloo" else ""), False


def cases() -> list[tuple[str, str, str, str]]:
    """Return the combinations to try: fault, MPI, job, backend."""
    if os.environ.get("LOCKSTEP_TEST_FAULTS") == "all":
        return [(how, mpi, *way) for mpi in MPIS for way in WAYS for how in FAULTS]
    chosen = []
    for i, how in enumerate(FAULTS):
        ways = [WAYS[i % 2], *WAYS[2:]]
        chosen += [(how, mpi, *ways[(i + n) % 3]) for n, mpi in enumerate(MPIS)]
    return chosen


@pytest.mark.parametrize(("how", "name", "job", "backend"), cases())
def test_a_rank_goes_wrong(how: str, name: str, job: str, backend: str, tmp_path: Path) -> None:
    """Rank 1 alone is named, once, in time; the job ends, with a code, and nothing is left."""
    found = run(name, f"{how}:1:5", (job, backend), tmp_path, *QUICK)
    pattern, at_limit = said(how, job, backend)
    after = found.when(rf"{HEAD.pattern}[^\n]*\n +{pattern}" if at_limit else pattern)
    after -= LIMIT if at_limit else 0.0
    load = os.getloadavg()[0]
    print(f"{how}, {name}, {job} over {backend}: said after {after:.2f} s, load {load:.1f}")
    assert after < MORE, str(found.outcome)
    assert found.outcome.code != 0, str(found.outcome)
    assert found.blamed <= {1}, str(found.outcome)
    assert len([line for _, line in found.lines if HEAD.match(line)]) <= 1, str(found.outcome)
    assert not found.left, str(found.outcome)


@dataclass(frozen=True)
class Special:
    """A fault of another kind: faults, job, backend, what is said, and who may be blamed."""

    faults: str
    job: str
    backend: str
    said: str
    blamed: frozenset[int]


STOPPED = r"{} \([^)]+\) is stopped \(SIGSTOP"
SPECIAL = {
    "root-stopped": Special(
        "stop:0:5",
        "sync_sgd",
        "mpi",
        r"rank 0, which would speak for all, [^\n]*\n +" + STOPPED.format("rank 0"),
        frozenset({0}),
    ),
    "both-reporters-stopped": Special(
        "stop:0:5,stop:1:5",
        "mnist_ddp",
        "gloo",
        STOPPED.format("rank 0") + r"[^\n]*\n +" + STOPPED.format("rank 1"),
        frozenset({0, 1}),
    ),
    "two-loops": Special(
        "loop:1:1,loop:2:1",
        "mnist_ddp",
        "mpi",
        r"rank 1 [^\n]*; it is in faulty.py:\d+[^\n]*\n +rank 2 [^\n]*; it is in faulty.py:\d+",
        frozenset({1, 2}),
    ),
    "dies-during-the-verdict": Special(
        "stop:1:21,doomed:2:21",
        "mnist_ddp",
        "mpi",
        STOPPED.format("rank 1"),
        frozenset({1, 2}),
    ),
    "in-the-test": Special(
        "loop:1:test1",
        "sync_sgd",
        "mpi",
        rf"{NAME} has not entered all_reduce #1 of group 0 \(float64\[3\][^\n]*; it is in faulty",
        frozenset({1}),
    ),
    "longer-tensor": Special(
        "longer:1:5",
        "mnist_ddp",
        "gloo",
        r"rank [02] \([^)]+\) is gone \(SIGABRT, signal 6\); last seen in mnist_ddp.py|"
        r"shapes differ in all_reduce #\d+: rank 1 float32\[1000000\] \(faulty.py:\d+\)",
        frozenset({0, 1, 2}),
    ),
}


@pytest.mark.parametrize("case", list(SPECIAL))
def test_more_goes_wrong(case: str, tmp_path: Path) -> None:
    """The root, those that look after a node, several at once; at the first step and the last."""
    it = SPECIAL[case]
    found = run("openmpi", it.faults, (it.job, it.backend), tmp_path, *QUICK)
    # gloo's crash may end the job before the verdict; then the witness names the rank
    verdict = "" if case == "longer-tensor" else rf"{HEAD.pattern}[^\n]*\n(?: [^\n]*\n)*? *"
    after = found.when(verdict + it.said)
    print(f"{case}: said {after:.2f} s after the event, with a limit of {LIMIT:g} s")
    assert after < LIMIT + MORE, str(found.outcome)
    assert found.outcome.code != 0, str(found.outcome)
    assert found.blamed <= it.blamed, str(found.outcome)
    assert not found.left, str(found.outcome)


def test_at_a_checkpoint_the_stacks_go_to_the_run(tmp_path: Path) -> None:
    """A rank loops before it saves; the others wait for it in the checkpoint."""
    flags = ["--width", "4", "--batch-size", "250", "--save-steps", "2", "--run", "night"]
    found = run("openmpi", "loop:1:save1", ("resnet_ddp", "mpi"), tmp_path, *flags)
    found.when(rf"{HEAD.pattern}[^\n]*\n +{NAME} has not entered save #\d+ of group world")
    assert found.outcome.code != 0, str(found.outcome)
    assert found.blamed == {1}, str(found.outcome)
    assert "in go_wrong" in (tmp_path / "night" / "stacks-rank1.txt").read_text()
    assert not found.left, str(found.outcome)


def test_goes_on_over_gloo_if_asked(tmp_path: Path) -> None:
    """LOCKSTEP_WATCHDOG=wait: a verdict at the limit, though gloo says nothing; all ends well."""
    way = "mnist_ddp", "gloo"
    found = run("openmpi", "slow:1:5", way, tmp_path, *QUICK, LOCKSTEP_WATCHDOG="wait")
    late = rf"{NAME} has not entered all_reduce #\d+ [^\n]*; it is in faulty.py"
    after = found.when(rf"(step|all_reduce) #\d+ [^\n]*stood for its limit of 5 s\n +{late}")
    assert after < LIMIT + MORE, str(found.outcome)
    assert found.outcome.code == 0, str(found.outcome)


def test_check_mode_finds_what_gloo_would_crash_of(tmp_path: Path) -> None:
    """LOCKSTEP_CHECK=1: DDP trains, and the first call that differs is an error on all ranks."""
    way = "mnist_ddp", "gloo"
    found = run("openmpi", "longer:1:5", way, tmp_path, *QUICK, LOCKSTEP_CHECK="1")
    said = (
        r"rank 1 called all_reduce #\d+ \(float32\[1000000\]\), where the others called all_reduce"
    )
    after = found.when(said)
    assert after < LIMIT, str(found.outcome)
    assert "SIGABRT" not in found.outcome.text, str(found.outcome)
    assert "Loss: " in found.outcome.text, str(found.outcome)
    assert found.outcome.code != 0, str(found.outcome)
    assert not found.left, str(found.outcome)
