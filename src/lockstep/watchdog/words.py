"""Ranks, and where they are, in the words of a verdict. Local, and pure."""

from __future__ import annotations

from collections.abc import Iterable

from lockstep.notes import TRAINING
from lockstep.watchdog.report import RankReport, Standing

# So many ranks are named one by one; of more, the first.
_NAMED = 8


def whereabouts(it: RankReport) -> str:
    """Say what a late rank does instead."""
    if (call := waits_in(it)) is not None:
        return f"; it waits in {call}"
    if not it.place:
        return ""
    if it.life == "stopped":
        return f"; last seen in {it.place}{since(it)}"  # a moment before, perhaps
    stuck = ", which does not let go of the interpreter" if it.stuck else ""
    return f"; it is in {it.place}{since(it)}{stuck}"


def waits_in(it: RankReport) -> Standing | None:
    """Return the call that a rank is in, if it is in one."""
    return next((call for call in it.open if call.group != TRAINING), None)


def left_at(it: RankReport) -> str:
    """Say where in the user's code a rank was that has left, or is gone."""
    if not it.place:
        return ""
    return f" in {it.place}" if it.left else f"; last seen in {it.place}"


def since(it: RankReport) -> str:
    """Say for how long a rank has been where it is, if that is known."""
    return f" since {it.since:.0f} s" if it.since >= 0 else ""


def name_of(it: RankReport) -> str:
    """Name a rank and its host."""
    return f"rank {it.rank} ({it.host})"


def places_of(reports: Iterable[RankReport]) -> list[str]:
    """Say where ranks are, a line a place."""
    places: dict[str, list[int]] = {}
    for it in reports:
        places.setdefault(it.place, []).append(it.rank)
    return shortened([f"{spelled(ranks)} in {where}" for where, ranks in places.items() if where])


def process_of(it: RankReport) -> str:
    """Name the process, for a command on its host; "" if it is unknown."""
    return f"process {it.pid}" if it.pid else ""


def spelled(ranks: Iterable[int]) -> str:
    """Number ranks, the first ones of many."""
    ranks = list(ranks)
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"rank {', '.join(map(str, ranks[:_NAMED]))}{more}"


def shortened(lines: list[str]) -> list[str]:
    """Return the first lines of many, and how many more there are."""
    more = [f"… and {len(lines) - _NAMED} more"] if len(lines) > _NAMED else []
    return lines[:_NAMED] + more
