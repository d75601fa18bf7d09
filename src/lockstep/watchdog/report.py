"""What a rank is doing, as the root is told: clocks of two hosts are never compared."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from time import monotonic_ns
from typing import Any

from lockstep.notes import CLOSED, EXITED, GAVE_UP, MESSAGES, RAISED, TRAINING
from lockstep.watchdog.reading import Call, Notes

# How many calls that are over are reported.
LAST = 16
# How a rank has left that says it is another's fault.
UP = "giving up"
# A thread that has not had the interpreter for so many seconds: the main thread does not let go.
_STUCK = 3.0
# After so many seconds without a look it is unknown whether a call that has to be looked at lasts.
_BLIND = 1.0


@dataclass(frozen=True)
class Standing:
    """A call of a rank.

    Attributes:
        group, number, verb, what: as in notes.Call.
        members: ranks of the group as the rank wrote them, "0-3,8"; "" if unknown.
        place: file and line of the user's code, train.py:88; "" if unknown.
        seconds: since it was begun.
        seen: it lasted when the rank last looked, a moment ago.
    """

    group: str
    members: str
    number: int
    verb: str
    what: str
    place: str
    seconds: float
    seen: bool = False

    def __str__(self) -> str:
        return self._with_details(f"{self.verb} #{self.number} of group {self.group}")

    @property
    def words(self) -> str:
        """The call without its number, which for a message says nothing to others."""
        return self._with_details(self.verb)

    def _with_details(self, name: str) -> str:
        inside = ", ".join(part for part in (self.what, self.place) if part)
        return f"{name} ({inside})" if inside else name


@dataclass(frozen=True)
class RankReport:
    """What is known of a rank.

    Attributes:
        rank, host: which one.
        life: running, stopped, gone; or silent, if nobody on its host answers.
        how: it ended, if it is gone and the system tells.
        left: how it left the session: "", closed, an exception, exit code 3, giving up.
        place: where its main thread is in the user's code; "" if unknown.
        since: seconds since its last call was over, or begun; negative if it has called nothing.
        pid: its process, on its host; 0 if unknown.
        stuck: its main thread does not let go of the interpreter.
        ending: its program is over.
        open: calls that are not over, oldest first.
        done: the last calls that are over.
    """

    rank: int
    host: str
    life: str = "running"
    how: str = ""
    left: str = ""
    place: str = ""
    since: float = -1.0
    pid: int = 0
    stuck: bool = False
    ending: bool = False
    open: list[Standing] = field(default_factory=list)
    done: list[Standing] = field(default_factory=list)

    @property
    def calls(self) -> list[Standing]:
        """All calls that are reported, those that are over first."""
        return [*self.done, *self.open]

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return asdict(self)

    @staticmethod
    def of_json(values: dict[str, Any]) -> RankReport:
        """Make it again from plain values."""
        calls = {key: [Standing(**call) for call in values[key]] for key in ("open", "done")}
        return RankReport(**{**values, **calls})


def report(rank: int, host: str, notes: Notes, life: str, how: str) -> RankReport:
    """Turn a rank's notes into a report. Local; on its own host."""
    now = monotonic_ns()
    last = max((max(call.entered, call.left) for call in notes.calls), default=0)
    stuck = bool(notes.beat) and life == "running" and now - notes.beat > _STUCK * 1e9
    # Who does not look cannot know whether such a call still lasts.
    blind = life != "running" or now - notes.beat > _BLIND * 1e9
    lasting = [call for call in notes.open if not (call.seen and blind)]
    return RankReport(
        rank,
        host,
        life,
        how,
        _left(notes),
        f"{notes.file}:{notes.line}" if notes.file else "",
        (now - last) / 1e9 if last else -1.0,
        notes.pid,
        stuck,
        open=[_standing(call, now) for call in lasting],
        done=[_standing(call, now) for call in notes.calls if call not in lasting][-LAST:],
    )


def facts_of(call: Call, age: float) -> dict[str, Any]:
    """Return what the head of a verdict says of a call that stands since age seconds. Local."""
    group = call.group.partition("|")[0]
    what = f"{call.verb} #{call.number}"
    if group not in (MESSAGES, TRAINING):
        what = f"{what} of group {group}"
    which = {"group": call.group, "number": call.number}
    return {"what": what, "seconds": age, "limit": call.limit, **which}


def _left(notes: Notes) -> str:
    if notes.state == CLOSED:
        return "closed"
    if notes.state == EXITED:
        return f"exit code {notes.code}"
    return {RAISED: "an exception", GAVE_UP: UP}.get(notes.state, "")


def _standing(call: Call, now: int) -> Standing:
    group, _, members = call.group.partition("|")
    place = f"{call.file}:{call.line}" if call.file else ""
    number, seen = call.number, bool(call.seen)
    return Standing(group, members, number, call.verb, call.what, place, call.age(now), seen)


def is_over(facts: dict[str, Any], reports: Iterable[RankReport]) -> bool:
    """Say whether a call, by its facts, stands nowhere any more. Local."""
    which = str(facts.get("group", "")).partition("|")[0], facts.get("number")
    return not any((call.group, call.number) == which for it in reports for call in it.open)


def facts_of_last(said: Notes) -> dict[str, Any]:
    """Return what is known of the call of a rank that has failed. Local."""
    return facts_of(said.open[-1], 0.0) if said.open else {"what": "a call of torch's"}
