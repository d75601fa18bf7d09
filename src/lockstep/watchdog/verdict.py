"""Who is to blame: from what every rank is doing to one verdict. Local, and pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.notes import MESSAGES, TRAINING, UNKNOWN
from lockstep.ranges import unlisted
from lockstep.watchdog.report import LAST, UP, RankReport, Standing
from lockstep.watchdog.words import (
    left_at,
    name_of,
    places_of,
    process_of,
    shortened,
    since,
    spelled,
    waits_in,
    whereabouts,
)

_ENDED, _KILLED = "SIGTERM, signal 15", "SIGKILL, signal 9"
_ABORT = "SIGABRT, signal 6"
_CRASHES = (_ABORT, "SIGSEGV, signal 11")
_GLOO = [
    "gloo ends a rank so if another one brings a longer tensor: compare these lines, or start it",
    "again with LOCKSTEP_CHECK=1, which compares the calls",
]
# Verbs to which each rank may bring tensors of its own size.
_UNEVEN = {"all_to_all", "all_to_all_single", "all_reduce_sparse", "reduce_scatter"}


# What to say, whom to blame, and whose stacks tell more.
Finding = tuple[list[str], set[int], list[int]]


@dataclass(frozen=True)
class Verdict:
    """What is wrong.

    Attributes:
        text: for the user, a sentence a line.
        late: the ranks whose stacks tell more.
        blamed: the ranks that keep the others waiting, if they are known.
        fatal: it cannot end well by itself: a rank's process has ended, or is about to, or a rank
            that has closed the session is waited for.
    """

    text: str
    late: list[int]
    blamed: frozenset[int] = frozenset()
    fatal: bool = False


def judge(
    reports: Sequence[RankReport],
    waits: int | None = None,
    told: frozenset[int] = frozenset(),
) -> Verdict:
    """Say who keeps the others waiting, and why.

    Args:
        reports: of all ranks.
        waits: a rank whose call has failed because of another one.
        told: who was blamed a moment ago, so that the job ends.
    """
    victims = _victims(reports, told)
    lines, late, known = _absent([it for it in reports if it.rank not in victims])
    blamed = set(known) if lines else set()
    present = [it for it in reports if it.rank not in known | victims]
    # After a verdict ranks leave their calls one by one: what stands then tells nothing new.
    said, odd, more = ([], set(), []) if told else _compare_calls(reports, present)
    if not said and present and not told:
        if not lines:
            said, odd, more = _by_place(present, waits)
        elif crashes := {it.how for it in reports if it.how in _CRASHES and it.rank in known}:
            # Where the others are may be what has made it crash; but none of them is blamed.
            said = places_of(present)
            if _ABORT in crashes and not any(c.members for it in reports for c in it.calls):
                said += _GLOO
    lines += said
    if not lines and victims:
        lines = [f"{spelled(sorted(victims))} gave up waiting for others"]
    fatal = any(it.life == "gone" or it.ending for it in reports) or _deserted(reports)
    late = sorted({*late, *more})
    return Verdict("\n".join(lines), late, frozenset(blamed | odd), fatal)


def _compare_calls(reports: Sequence[RankReport], present: Sequence[RankReport]) -> Finding:
    """Say what the calls of the ranks tell."""
    if (found := last_calls(reports))[0]:
        return found
    if (standing := _call_that_stands(reports)) is not None:
        return _compare(standing, reports, present)
    return _messages(present), set(), []


def _victims(reports: Sequence[RankReport], told: frozenset[int]) -> set[int]:
    """Return the ranks that end because of others, so that nothing is to be said of them."""
    gone = {it.rank: it.how for it in reports if it.life == "gone" and it.left != "closed"}
    gave_up = {it.rank for it in reports if it.left == UP} - told
    if told:  # who crashes now does so since others end
        return gave_up | {rank for rank, how in gone.items() if how != _KILLED} - told
    # by the signal that launchers send to all when one has ended
    ended = {rank for rank, how in gone.items() if how == _ENDED}
    return gave_up | (ended if gone.keys() - ended - gave_up else set())


def _absent(reports: Sequence[RankReport]) -> tuple[list[str], list[int], set[int]]:
    """Name the ranks that are gone, silent or stopped, or have left."""
    lines, late, known = [], [], set()
    missed = any(it.open for it in reports)
    for it in reports:
        if it.life == "gone" and it.left != "closed":
            how = it.how or "killed, or ended without a word"
            lines.append(f"{name_of(it)} is gone ({how}){left_at(it)}")
            late += [it.rank] * (it.how in _CRASHES)
        elif it.life == "stopped":
            how = ", ".join(filter(None, ["SIGSTOP, Ctrl-Z or a debugger", process_of(it)]))
            lines.append(f"{name_of(it)} is stopped ({how}){whereabouts(it)}")
            late.append(it.rank)
        elif it.left == "closed":
            if missed:  # otherwise it is no news
                ended = " and ended" if it.life == "gone" else ""
                lines.append(f"{name_of(it)} has closed the session{ended}")
        elif it.left:
            lines.append(f"{name_of(it)} has left by {it.left}{left_at(it)}")
        else:
            continue
        known.add(it.rank)
    for host in dict.fromkeys(it.host for it in reports if it.life == "silent"):
        ranks = [it.rank for it in reports if it.host == host and it.life == "silent"]
        known.update(ranks)
        lines.append(f"{spelled(ranks)} ({host}): no answer from there: is the host cut off?")
    return shortened(lines), late, known


def _deserted(reports: Sequence[RankReport]) -> bool:
    """Say whether a call waits for a rank that has closed the session without it."""
    closed = [it for it in reports if it.left == "closed"]
    waits = [call for it in reports for call in it.open if call.members]
    return any(
        it.rank in _members(call, reports) and _has_not_entered(it, call)
        for it in closed
        for call in waits
    )


def _has_not_entered(it: RankReport, call: Standing) -> bool:
    """Say whether a rank is known not to have entered a call; it reports its last ones only."""
    numbers = [c.number for c in it.calls if c.group == call.group]
    if not numbers:
        return len(it.done) < LAST
    return max(numbers) < call.number


def _call_that_stands(reports: Sequence[RankReport]) -> Standing | None:
    """Return the call to look at; of a rank's calls of a group the first holds up the others.

    It is one that nobody keeps waiting who waits elsewhere: the others are consequences of it. Of
    several, the one that most ranks wait in.
    """
    firsts: dict[tuple[str, int], list[Standing]] = {}
    entered: dict[tuple[str, int], set[int]] = {}
    for it in reports:
        seen = {TRAINING, MESSAGES}
        for call in it.open:
            if call.group not in seen:
                seen.add(call.group)
                firsts.setdefault((call.group, call.number), []).append(call)
        for call in it.calls:
            entered.setdefault((call.group, call.number), set()).add(it.rank)
    waiting = {it.rank for it in reports if waits_in(it)}
    groups = Counter(call.group for calls in firsts.values() for call in calls)

    known = {it.rank for it in reports}

    def order(key: tuple[str, int]) -> tuple[bool, bool, int, int, int]:
        missing = (_members(firsts[key][0], reports) & known) - entered[key]
        held_up = bool(missing & waiting)
        return not missing, held_up, -groups[key[0]], -len(firsts[key]), key[1]

    if not firsts:
        return None
    return max(firsts[min(firsts, key=order)], key=lambda call: call.seconds)


def last_calls(reports: Sequence[RankReport]) -> Finding:
    """Compare the last call of each group: where calls differ, all ranks leave it with an error."""
    last: dict[tuple[str, str], int] = {}
    calls = [(it.rank, call) for it in reports for call in it.calls if call.members]
    for _, call in calls:
        group = call.group, call.members
        last[group] = max(call.number, last.get(group, 0))
    for group, number in last.items():
        same = {r: c for r, c in calls if (c.group, c.members, c.number) == (*group, number)}
        said, odd = _differing(same)
        if odd:
            return said, odd, []
    return [], set(), []


def _compare(
    standing: Standing, reports: Sequence[RankReport], present: Sequence[RankReport]
) -> Finding:
    """Compare what the members of the group have called with a call that stands."""
    members = _members(standing, reports)
    entered = {
        it.rank: call
        for it in reports
        for call in it.calls
        if (call.group, call.number) == (standing.group, standing.number)
    }
    waiting = [it.rank for it in reports if it.rank in entered and entered[it.rank] in it.open]
    said, odd = _differing(entered)
    if odd:
        return said, odd, []
    missing = [it for it in present if it.rank in members and it.rank not in entered]
    others = f"{len(waiting)} {'other waits' if len(waiting) == 1 else 'others wait'} there."
    if not missing:
        since = f"{spelled(waiting)} in {standing} since {standing.seconds:.0f} s"
        if len(entered) == len(members) and len(present) == len(reports):
            said = [f"{since}; all its ranks have entered it: the network, or slow ranks"]
            return said, set(), waiting
        return [since], set(), []
    ranks = [it.rank for it in missing]
    if len(missing) == len(waiting) and all(map(waits_in, missing)):
        both = [it for it in reports if it.rank in {*ranks, *waiting}]
        said = [f"{name_of(it)} waits in {waits_in(it)}" for it in both]
        ranks += waiting
        return [*shortened(said), "they wait for each other in different calls"], set(ranks), ranks
    lines = [f"{name_of(it)} has not entered {standing}{whereabouts(it)}" for it in missing]
    return [*shortened(lines), others], set(ranks), ranks


def _differing(entered: dict[int, Standing]) -> tuple[list[str], set[int]]:
    """Say in what the calls of the ranks differ, and whose are the odd ones."""
    known = {rank: c for rank, c in entered.items() if c.verb}
    unknown = {c.verb for c in known.values() if c.what == UNKNOWN} | _UNEVEN
    kinds = {rank: (c.verb, "" if c.verb in unknown else c.what) for rank, c in known.items()}
    if not kinds:
        return [], set()
    common = Counter(kinds.values()).most_common(1)[0][0]
    lines, odd = [], set()
    for rank, call in sorted(known.items()):
        if kinds[rank] == common:
            continue
        odd.add(rank)
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
    return shortened(lines), odd


def _messages(present: Sequence[RankReport]) -> list[str]:
    """Say who waits for a message, and where the others are."""
    waiting = {it.rank: c for it in present for c in it.open if c.group == MESSAGES}
    lines = [
        f"{name_of(it)} waits in {waiting[it.rank].words} since {waiting[it.rank].seconds:.0f} s"
        for it in present
        if it.rank in waiting
    ]
    others = [it for it in present if it.rank not in waiting and it.place] if lines else []
    return [
        *shortened(lines),
        *shortened([f"{name_of(it)} is in {it.place}{since(it)}" for it in others]),
    ]


def _by_place(present: Sequence[RankReport], waits: int | None) -> Finding:
    """Compare where the ranks are; all that is known of verbs that are not Lockstep's own."""
    places = Counter(it.place for it in present)
    if len(places) < 2:
        where = next(iter(places), "")
        return [f"{spelled([it.rank for it in present])} in {where or 'places unknown'}"], set(), []
    most = max(places.values())
    # Of two, the one whose call has failed is not late; but who calls another verb fails as well.
    asks = [it.place for it in present if it.rank == waits and places[it.place] == most]
    common = (asks or [place for place, count in places.items() if count == most])[0]
    odd = [it for it in present if it.place != common]
    lines = [f"{name_of(it)} is in {it.place or 'a place unknown'}{since(it)}" for it in odd]
    rest = spelled([it.rank for it in present if it.place == common])
    late = [it.rank for it in odd]
    return [*shortened(lines), f"{rest} in {common}"], set(late), late


def _members(standing: Standing, reports: Sequence[RankReport]) -> set[int]:
    """Return the ranks that a call needs: all, where it names none."""
    return unlisted(standing.members) or {it.rank for it in reports}
