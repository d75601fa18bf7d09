"""Who is to blame: from what every rank is doing to one verdict. Local, and pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lockstep.notes import MESSAGES, TRAINING
from lockstep.ranges import unlisted
from lockstep.watchdog.report import RankReport, Standing

# So many ranks are named one by one; of more, the first.
_NAMED = 8


@dataclass(frozen=True)
class Verdict:
    """What is wrong.

    Attributes:
        text: for the user, a sentence a line.
        late: the ranks whose stacks tell more.
        fatal: it cannot end well by itself: a rank's process has ended, or is about to.
    """

    text: str
    late: list[int]
    fatal: bool = False


def judge(reports: Sequence[RankReport]) -> Verdict:
    """Say who keeps the others waiting, and why."""
    lines, late, known = _absent(reports)
    fatal = any(it.life == "gone" or it.ending for it in reports)
    present = [it for it in reports if it.rank not in known]
    standing = _call_that_stands(reports)
    if standing is not None:
        said, more = _compare(standing, reports, present)
        lines += said
        late += more
    elif said := _messages(present):
        lines += said
    elif not lines:
        said, late = _by_place(present)
        lines += said
    return Verdict("\n".join(lines), sorted(set(late)), fatal)


def _absent(reports: Sequence[RankReport]) -> tuple[list[str], list[int], set[int]]:
    """Name the ranks that are gone, silent or stopped, or have left."""
    lines, late, known = [], [], set()
    for it in reports:
        name = f"rank {it.rank} ({it.host})"
        if it.life == "gone" and it.left != "closed":
            lines.append(f"{name} is gone ({it.how or 'killed, or ended without a word'})")
        elif it.life == "stopped":
            lines.append(f"{name} is stopped (SIGSTOP, Ctrl-Z or a debugger){_where(it)}")
            late.append(it.rank)
        elif it.left:
            done = "has closed the session" if it.left == "closed" else f"has left by {it.left}"
            lines.append(f"{name} {done}{' and ended' if it.life == 'gone' else ''}")
        else:
            continue
        known.add(it.rank)
    if not any(it.open for it in reports):
        # That ranks close the session is no news, unless somebody waits for them.
        lines = [line for line in lines if "has closed the session" not in line]
    for host in dict.fromkeys(it.host for it in reports if it.life == "silent"):
        ranks = [it.rank for it in reports if it.host == host and it.life == "silent"]
        known.update(ranks)
        lines.append(f"{_ranks(ranks)} ({host}): no answer from there: is the host cut off?")
    return _short(lines), late, known


def _call_that_stands(reports: Sequence[RankReport]) -> Standing | None:
    """Return the call that most ranks wait in; of a rank's calls the first holds up the others."""
    firsts: list[Standing] = []
    for it in reports:
        seen = {TRAINING, MESSAGES}
        for call in it.open:
            if call.group not in seen:
                seen.add(call.group)
                firsts.append(call)
    if not firsts:
        return None
    groups = Counter(call.group for call in firsts)
    group = max(groups, key=lambda name: groups[name])
    numbers = Counter(call.number for call in firsts if call.group == group)
    number = max(numbers, key=lambda it: (numbers[it], -it))
    same = [call for call in firsts if (call.group, call.number) == (group, number)]
    return max(same, key=lambda call: call.seconds)


def _compare(
    standing: Standing, reports: Sequence[RankReport], present: Sequence[RankReport]
) -> tuple[list[str], list[int]]:
    """Compare what the members of the group have called with a call that stands."""
    members = _members(standing, reports)
    entered = {
        it.rank: call
        for it in reports
        for call in (*it.done, *it.open)
        if (call.group, call.number) == (standing.group, standing.number)
    }
    waiting = [it.rank for it in reports if it.rank in entered and entered[it.rank] in it.open]
    if len({(call.verb, call.what) for call in entered.values()}) > 1:
        return _differing(entered), []
    missing = [it for it in present if it.rank in members and it.rank not in entered]
    others = f"{len(waiting)} {'other waits' if len(waiting) == 1 else 'others wait'} there."
    if not missing:
        since = f"{_ranks(waiting)} in {standing} since {standing.seconds:.0f} s"
        if len(entered) == len(members) and len(present) == len(reports):
            return [f"{since}; all its ranks have entered it: the network, or slow ranks"], waiting
        return [since], []
    lines = [f"{_name(it)} has not entered {standing}{_where(it)}" for it in missing]
    return [*_short(lines), others], [it.rank for it in missing]


def _differing(entered: dict[int, Standing]) -> list[str]:
    """Say in what the calls of the ranks differ."""
    common = Counter((call.verb, call.what) for call in entered.values()).most_common(1)[0][0]
    lines = []
    for rank, call in sorted(entered.items()):
        if (call.verb, call.what) == common:
            continue
        if call.verb != common[0]:
            lines.append(
                f"rank {rank} called {call.verb} #{call.number} ({call.place}) where the others "
                f"called {common[0]} #{call.number}"
            )
        else:
            lines.append(
                f"shapes differ in {call.verb} #{call.number}: rank {rank} {call.what} "
                f"({call.place}), others {common[1]}"
            )
    return _short(lines)


def _messages(present: Sequence[RankReport]) -> list[str]:
    """Say who waits for a message, and where the others are."""
    waiting = {it.rank: c for it in present for c in it.open if c.group == MESSAGES}
    lines = [
        f"{_name(it)} waits in {waiting[it.rank].words} since {waiting[it.rank].seconds:.0f} s"
        for it in present
        if it.rank in waiting
    ]
    others = [it for it in present if it.rank not in waiting and it.place] if lines else []
    return [*_short(lines), *_short([f"{_name(it)} is in {it.place}{_since(it)}" for it in others])]


def _by_place(present: Sequence[RankReport]) -> tuple[list[str], list[int]]:
    """Compare where the ranks are; all that is known of verbs that are not Lockstep's own."""
    places = Counter(it.place for it in present)
    if len(places) < 2:
        where = next(iter(places), "")
        return [f"{_ranks([it.rank for it in present])} in {where or 'places unknown'}"], []
    common = places.most_common(1)[0][0]
    odd = [it for it in present if it.place != common]
    lines = [f"{_name(it)} is in {it.place or 'a place unknown'}{_since(it)}" for it in odd]
    rest = f"{_ranks([it.rank for it in present if it.place == common])} in {common}"
    return [*_short(lines), rest], [it.rank for it in odd]


def _members(standing: Standing, reports: Sequence[RankReport]) -> set[int]:
    if standing.members:
        return unlisted(standing.members)
    return {
        it.rank for it in reports if any(c.group == standing.group for c in (*it.open, *it.done))
    }


def _where(it: RankReport) -> str:
    """Say what a late rank does instead."""
    calls = [call for call in it.open if call.group != TRAINING]
    if calls:
        return f"; it waits in {calls[0]}"
    if not it.place:
        return ""
    stuck = ", which does not let go of the interpreter" if it.stuck else ""
    return f"; it is in {it.place}{_since(it)}{stuck}"


def _since(it: RankReport) -> str:
    return f" since {it.since:.0f} s" if it.since >= 0 else ""


def _name(it: RankReport) -> str:
    return f"rank {it.rank} ({it.host})"


def _ranks(ranks: Iterable[int]) -> str:
    ranks = list(ranks)
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"rank {', '.join(map(str, ranks[:_NAMED]))}{more}"


def _short(lines: list[str]) -> list[str]:
    more = [f"… and {len(lines) - _NAMED} more"] if len(lines) > _NAMED else []
    return lines[:_NAMED] + more
