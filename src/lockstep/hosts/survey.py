"""Ask all hosts at once, in four rounds, each with a limit: who are you, what have you, when, meet.

The machine that asks is always among those asked, since the launch goes out from it. A host that
does not answer a round is left out of the next ones. All limits together are under a minute.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from lockstep.hosts.link import Link, LinkError, is_here

# Seconds a round: the login, the facts, one clock, the meeting.
GREET, FACTS, CLOCK, MEET = 10.0, 20.0, 4.0, 22.0
# Hosts that are asked at the same time.
_WORKERS = 64
# With more hosts than this, each looks only for its neighbours' and the first one's file.
_ALL_SEE_ALL = 32


@dataclass(frozen=True)
class Plan:
    """What is asked.

    Attributes:
        names: the hosts, as the hostfile has them.
        python: the interpreter, by its absolute path, on every host.
        checkout: root of Lockstep's checkout.
        directory: the working directory of the launch.
        launcher: path of mpirun or mpiexec; "" leaves it out.
        shared: a directory that all hosts share; "" leaves it out.
        packages: distributions whose versions have to agree.
    """

    names: tuple[str, ...]
    python: str
    checkout: str
    directory: str
    launcher: str = ""
    shared: str = ""
    packages: tuple[str, ...] = ("lockstep-mpi", "torch", "mpi4py", "numpy")


@dataclass
class Answer:
    """What one host has answered.

    Attributes:
        name: as the hostfile has it; this machine's own name where that is not in it.
        here: whether it is the machine that asks.
        listed: whether it is in the hostfile.
        trouble: why it does not answer (any more).
        login: user id, user, host name.
        facts: see `probe.facts`.
        ahead: seconds that its clock is ahead of this machine's, and the uncertainty of that.
        met: see `probe.meet`.
    """

    name: str
    here: bool
    listed: bool = True
    trouble: LinkError | None = None
    login: tuple[str, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    ahead: tuple[float, float] = (0.0, 0.0)
    met: dict[str, Any] = field(default_factory=dict)


@dataclass
class _Asked:
    answer: Answer
    number: str
    link: Link | None = None


def neighbours(index: int, count: int) -> list[int]:
    """Return the hosts before and after one, in a ring. Local."""
    return sorted({(index - 1) % count, (index + 1) % count} - {index})


def survey(plan: Plan) -> list[Answer]:
    """Ask every host, and this machine. Local, under a minute.

    Returns:
        an answer a host in the hostfile's order; before them one of this machine, if it is not
        among them.
    """
    answers = [Answer(name, is_here(name)) for name in plan.names]
    if not any(answer.here for answer in answers):
        answers.insert(0, Answer("this machine", here=True, listed=False))
    asked = [_Asked(answer, secrets.token_hex(16)) for answer in answers]
    with ThreadPoolExecutor(min(_WORKERS, len(asked))) as pool:

        def round_of(what: Callable[[_Asked], None]) -> None:
            alive = [one for one in asked if one.answer.trouble is None]
            list(pool.map(lambda one: _try(what, one), alive))

        try:
            round_of(lambda one: _greet(one, plan))
            round_of(lambda one: _facts(one, plan))
            round_of(_clock)
            questions = _meetings(asked, plan)
            round_of(lambda one: _meet(one, questions[one.number]))
        finally:
            list(pool.map(_close, asked))
    return answers


def _try(what: Callable[[_Asked], None], one: _Asked) -> None:
    try:
        what(one)
    except LinkError as error:
        one.answer.trouble = error
        one.answer.login = one.answer.login or error.login


def _greet(one: _Asked, plan: Plan) -> None:
    one.link = Link(one.answer.name, plan.python, one.answer.here)
    one.link.greet(GREET)
    one.answer.login = one.link.login


def _facts(one: _Asked, plan: Plan) -> None:
    assert one.link is not None
    question = {
        "ask": "facts",
        "door": one.number,
        "names": plan.names,
        "checkout": plan.checkout,
        "directory": plan.directory,
        "shared": plan.shared,
        "launcher": plan.launcher,
        "packages": plan.packages,
    }
    one.answer.facts = one.link.ask(question, FACTS)


def _clock(one: _Asked) -> None:
    """Compare its clock with ours: it was read somewhere between question and answer."""
    assert one.link is not None
    before = time.time()
    theirs = float(one.link.ask({"ask": "clock"}, CLOCK)["time"])
    after = time.time()
    one.answer.ahead = (theirs - (before + after) / 2, (after - before) / 2)


def _meetings(asked: Sequence[_Asked], plan: Plan) -> dict[str, dict[str, Any]]:
    """Return the last question for each host that is left, by the number of its door."""
    alive = [one for one in asked if one.answer.trouble is None]
    listed = [one for one in alive if one.answer.listed]
    token = secrets.token_hex(8)
    sharing = {i for i, one in enumerate(alive) if one.answer.facts["shared"] is True}
    questions = {}
    for index, one in enumerate(alive):
        others = neighbours(index, len(alive))
        seen = sharing if len(alive) <= _ALL_SEE_ALL else sharing & {0, index, *others}
        near = [alive[i] for i in others if alive[i] in listed]
        questions[one.number] = {
            "ask": "meet",
            "doors": [(it.answer.name, it.answer.facts["port"], it.number) for it in near],
            "ssh": [it.answer.name for it in near] if one.answer.listed else [],
            "shared": plan.shared if index in sharing else "",
            "token": token,
            "number": index,
            "others": sorted(seen),
        }
    return questions


def _meet(one: _Asked, question: dict[str, Any]) -> None:
    assert one.link is not None
    one.answer.met = {"number": question["number"], **one.link.ask(question, MEET)}


def _close(one: _Asked) -> None:
    if one.link is not None:
        one.link.close()
