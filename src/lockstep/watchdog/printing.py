"""How a verdict is printed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import Any

from lockstep.watchdog.report import RankReport, is_over
from lockstep.watchdog.verdict import judge


def say(text: str) -> None:
    """Print a verdict, in one write, so that the lines of several ranks do not mix. Local."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def alone(
    reason: str,
    call: dict[str, Any],
    reports: Sequence[RankReport],
    silent: str,
    told: frozenset[int],
) -> frozenset[int]:
    """Print the verdict of one node, since the root does not answer. Local.

    Args:
        reason, call: as a watcher calls it.
        reports: of the ranks of the node.
        silent: what to say of the root.
        told: who has been blamed before.

    Returns:
        who is blamed now.
    """
    if reason == "warn" and is_over(call, reports):
        return frozenset()
    verdict = judge(reports, told=told)
    if verdict.blamed <= told and (told or reason == "left"):
        return verdict.blamed  # a consequence
    lines = [f"lockstep: {head(reason, call)}", f"  {silent}"]
    say("\n".join([*lines, *(f"  {it}" for it in lines_of(verdict.text))]))
    return verdict.blamed


def head(reason: str, call: dict[str, Any]) -> str:
    """Return the first line: why a verdict is given. Local."""
    what, seconds = call.get("what", "a call"), call.get("seconds", 0.0)
    return {
        "warn": f"{what} stands since {seconds:.0f} s; its limit is {call.get('limit', 0.0):g} s",
        "limit": f"{what} has stood for its limit of {call.get('limit', 0.0):g} s",
        "quit": "SIGQUIT: what the ranks are doing",
        "gone": "a rank is gone",
        "left": "a rank has left while others wait for it",
    }.get(reason, f"{what} cannot end")


def main_stack(stacks: str) -> str:
    """Return the stack of the main thread, which comes last, of those of all threads. Local."""
    return "\n".join(f"  {line}" for line in stacks.strip().split("\n\n")[-1].splitlines())


def lines_of(text: str) -> list[str]:
    """Return the lines of a verdict. Local."""
    return text.splitlines() or ["nothing stands still"]


def table(reports: Sequence[RankReport]) -> list[str]:
    """Return a line a rank, or for ranks that do the same. Local."""
    lines: dict[str, list[int]] = {}
    for it in reports:
        inside = f"in {it.open[-1]}" if it.open else ""
        doing = ", ".join(part for part in (it.life, it.place, inside) if part)
        lines.setdefault(f"({it.host}) {doing}", []).append(it.rank)
    return [f"rank {', '.join(map(str, ranks))} {text}" for text, ranks in lines.items()]
