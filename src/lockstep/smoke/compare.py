"""Who differs from the others, and how to name them. Everything here is Local."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

from lockstep.rendezvous.agree import shorten
from lockstep.smoke.check import Who

H = TypeVar("H", bound=Hashable)


def odd_ones(values: Mapping[int, H]) -> tuple[H, dict[H, list[int]]]:
    """Return the value that most ranks have, and the ranks that have another, by value.

    Of values that equally many ranks have, that of the lowest rank counts as the common one.
    """
    common = Counter(values[rank] for rank in sorted(values)).most_common(1)[0][0]
    others: dict[H, list[int]] = {}
    for rank in sorted(values):
        if values[rank] != common:
            others.setdefault(values[rank], []).append(rank)
    return common, others


def named(ranks: Iterable[int], roster: Mapping[int, Who]) -> str:
    """Name ranks by number and host, whole hosts by their ranks: "ranks 2, 3 (node2)"."""
    hosts: dict[str, list[int]] = {}
    for rank in sorted(ranks):
        hosts.setdefault(roster[rank].host if rank in roster else "host unknown", []).append(rank)
    texts = []
    for host, members in hosts.items():
        word = "rank" if len(members) == 1 else "ranks"
        texts.append(f"{word} {spans(members)} ({host})")
    return shorten(texts)


def spans(numbers: Iterable[int]) -> str:
    """Write numbers as 0-3, 7."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(
        str(low) if low == high else f"{low}{'-' if high > low + 1 else ', '}{high}"
        for low, high in runs
    )


def by_node(roster: Mapping[int, Who]) -> dict[int, list[int]]:
    """Return the ranks of each node, in order."""
    nodes: dict[int, list[int]] = {}
    for rank in sorted(roster):
        nodes.setdefault(roster[rank].node, []).append(rank)
    return nodes
