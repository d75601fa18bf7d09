"""Ranks in few words: "0-3,8"."""

from __future__ import annotations

from collections.abc import Sequence


def listed(ranks: Sequence[int]) -> str:
    """Spell ranks shortly: "0-3,8". Local."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][-1] + 1:
            parts[-1][1:] = [rank]
        else:
            parts.append([rank])
    return ",".join("-".join(map(str, part)) for part in parts)


def unlisted(text: str) -> set[int]:
    """Return the ranks of such a text. Local."""
    ranks: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        ranks.update(range(int(first), int(last or first) + 1))
    return ranks
