"""Run the checks in order, on all ranks, so that nothing that happens on one can hold up the rest.

The root tells the ranks which check to run, and collects what each has found by messages of their
own: a rank that does not answer in time is named, and the checks go on without it as far as they
can. On each rank the main thread does the work while another one keeps the time and talks to the
root; so a call that never returns from C is reported like any other trouble.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn

from lockstep.ending import abort
from lockstep.rendezvous.agree import limited
from lockstep.smoke import processes
from lockstep.smoke.bell import Bell
from lockstep.smoke.check import Check, Finding, Lab, Options, Who, who
from lockstep.smoke.compare import by_node
from lockstep.smoke.explain import explain
from lockstep.smoke.hands import Answer, Hands
from lockstep.smoke.post import Command, Post
from lockstep.smoke.report import Report
from lockstep.world import World

# Seconds beyond its limit after which a rank is given up: its own watch ends at the limit.
_GRACE = 3.0
# Seconds that the root may take between two commands: the grace, a look around, the pictures.
_BETWEEN = 14.0
_LOOK = 2.0
_HELLO = 0


class _Ended(Exception):
    """The launcher has sent SIGTERM."""


def conduct(
    world: World, checks: Sequence[Check], options: Options, report: Callable[[], Report]
) -> int:
    """Run the checks. Collective.

    Ends the job itself, with the verdict written, where some rank does not answer or hangs.

    Args:
        world: all ranks of the launch.
        checks: the same on all ranks.
        options: likewise.
        report: makes the report; called on the root alone.

    Returns:
        the exit code: 0, or 1 if a check has failed or could not be run; the same on all ranks.
    """
    hands = Hands()
    if world.rank == 0:
        part: _Root | _Member = _Root(world, checks, options, hands, report())
    else:
        part = _Member(world, checks, options, hands)
    thread = threading.Thread(target=part.conduct, name="lockstep-conductor", daemon=True)
    thread.start()
    hands.serve()
    thread.join()
    if part.error is not None:
        raise part.error
    return part.code


class _Part:
    """What the root and the others have in common."""

    def __init__(
        self, world: World, checks: Sequence[Check], options: Options, hands: Hands
    ) -> None:
        self.code = 1
        self.error: BaseException | None = None
        self._world, self._checks, self._options, self._hands = world, checks, options, hands
        self._lab, self._post = Lab(world, options), Post(world)

    def conduct(self) -> None:
        """Play this part to its end; an error in it is raised by the main thread."""
        try:
            self._play()
        except BaseException as error:
            self.error = error
        finally:
            self._hands.stop()

    def _play(self) -> None:
        raise NotImplementedError


class _Member(_Part):
    """A rank other than the root: does what it is told."""

    def _play(self) -> None:
        patience = self._options.limit + _BETWEEN
        self._post.answer(_HELLO, who(self._world))
        while (command := self._post.await_command(patience)) is not None:
            if command.kind == "run":
                check = self._checks[command.check]
                work = _work(check, self._lab)
                self._post.answer(command.number, self._hands.do(work, command.limit))
            elif command.kind == "look":
                found = {pid: processes.state(pid) for pid in command.pids}
                self._post.answer(command.number, found)
            else:
                self.code = command.code
                self._post.flush(_LOOK)
                return
        sys.stderr.write(
            f"lockstep: {self._world}: rank 0, the root of the smoke test, has not been heard of "
            f"for {patience:g} s\n  needed: a root that runs, on a host that can be reached\n"
            f"  to do:  look at rank 0: is its process stopped, its host or network down?\n"
        )
        abort(1)


class _Root(_Part):
    """Rank 0: says what is to be done, waits with limits, and judges."""

    def __init__(
        self,
        world: World,
        checks: Sequence[Check],
        options: Options,
        hands: Hands,
        report: Report,
    ) -> None:
        super().__init__(world, checks, options, hands)
        self._report, self._start, self._number = report, time.monotonic(), _HELLO
        self._bell = Bell()
        self._roster: dict[int, Who] = {0: who(world)}
        self._lab.roster = self._roster
        self._lost: dict[int, str] = {}
        self._hung: set[int] = set()
        # why checks that need all ranks cannot be run any more
        self._apart = ""

    def _play(self) -> None:
        try:
            self._call_roll()
            for number, check in enumerate(self._checks):
                self._one(number, check)
        except _Ended:
            self._ended()
        code = self._report.close("done")
        if self._lost or self._hung:
            self._clear_up()
            if any(self._roster[rank].node for rank in self._lost if rank in self._roster):
                print("Should mpirun wait for the lost host now: Ctrl-C ends it.", flush=True)
            abort(code or 1)
        self.code = code
        self._post.command(self._others(), Command("end", self._number + 1, code=code))
        self._post.flush(_LOOK)

    def _others(self) -> list[int]:
        return [rank for rank in range(1, self._world.size) if rank not in self._lost]

    def _call_roll(self) -> None:
        """Learn who the ranks are; those that do not even say that are lost from the start."""
        wait = self._options.limit
        self._roster |= self._post.collect(self._others(), _HELLO, wait, self._watch)
        for rank in self._others():
            if rank not in self._roster:
                self._lost[rank] = f"has not been heard of in {wait:g} s"

    def _one(self, number: int, check: Check) -> None:
        left = self._start + self._options.within - time.monotonic()
        if reason := self._cannot(check, left):
            finding = Finding(summary=reason, ran=False)
            self._report.add(check, finding, 0.0)
            return
        limit = min(self._options.limit_of(check.limit), left)
        self._report.begin(check)
        start, known = time.monotonic(), set(self._lost) if number else set()
        answers = self._ask(Command("run", self._count(), check=number, limit=limit), check)
        missing = [rank for rank in (0, *self._others()) if rank not in answers]
        if missing:
            self._look_at(missing, time.monotonic() - start)
        hung = {rank for rank, answer in answers.items() if answer.hung}
        self._hung |= hung
        if self._lost:
            self._apart = f"{len(self._lost)} of {self._world.size} do not answer"
        elif hung and check.together:
            self._apart = f"the check {check.name!r} hangs"
        new = {rank: state for rank, state in self._lost.items() if rank not in known}
        finding = explain(check, answers, new, limit, self._lab)
        if self._lost and not new:
            finding.summary += f" (without {len(self._lost)} of {self._world.size} ranks)"
        self._report.add(check, finding, time.monotonic() - start)

    def _cannot(self, check: Check, left: float) -> str:
        """Say why a check cannot be run, "" if it can."""
        if left < 1.0:
            return f"not run: the {self._options.within:g} s for all checks are over"
        if check.together and self._apart:
            return f"not run: it needs all ranks, and {self._apart}"
        return ""

    def _ask(self, command: Command, check: Check) -> dict[int, Answer]:
        """Let all ranks run a check, this one too, and return their answers."""
        self._post.command(self._others(), command)
        end = time.monotonic() + command.limit + _GRACE
        mine = self._hands.do(_work(check, self._lab), command.limit, self._watch)
        left = max(end - time.monotonic(), 0.1)
        return {0: mine} | self._post.collect(self._others(), command.number, left, self._watch)

    def _look_at(self, missing: list[int], waited: float) -> None:
        """Ask a rank on the same host what has become of each that is missing; call them lost."""
        number, asked = self._count(), {}
        states: dict[int, str] = {}
        for ranks in by_node(self._roster).values():
            pids = tuple(self._roster[rank].pid for rank in ranks if rank in missing)
            alive = [rank for rank in ranks if rank not in missing and rank not in self._lost]
            if pids and alive and alive[0] == 0:
                states |= {pid: processes.state(pid) for pid in pids}
            elif pids and alive:
                asked[alive[0]] = pids
                self._post.command([alive[0]], Command("look", number, pids=pids))
        for found in self._post.collect(asked, number, _LOOK, self._watch).values():
            states |= found
        for rank in missing:
            state = states.get(self._roster[rank].pid, "") if rank in self._roster else ""
            self._lost[rank] = state or f"has not been heard of for {waited:.0f} s"

    def _count(self) -> int:
        self._number += 1
        return self._number

    def _watch(self) -> None:
        if self._bell.rings():
            raise _Ended

    def _clear_up(self) -> None:
        """Remove what a check that hangs has left in the shared directory, if that can be done."""
        for place in self._lab.to_remove:
            with contextlib.suppress(TimeoutError):
                limited(partial(shutil.rmtree, place, ignore_errors=True), _LOOK)

    def _ended(self) -> NoReturn:
        """The launcher ends the job, mostly because a rank has died: say what can be said."""
        node = self._roster[0].node
        states = {
            rank: processes.state(it.pid) for rank, it in self._roster.items() if it.node == node
        }
        # Those that the launcher has missed are gone; what it ends because of them dies just now.
        dead = {rank: state for rank, state in states.items() if state == "is gone"}
        dead = dead or {rank: state for rank, state in states.items() if state == "has died"}
        self._report.ended(dead, self._roster)
        self._clear_up()
        abort(1)


def _work(check: Check, lab: Lab) -> Callable[[], object]:
    return lambda: check.measure(lab)
