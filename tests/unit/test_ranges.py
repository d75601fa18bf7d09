"""Ranks in few words, and back."""

from __future__ import annotations

import pytest

from lockstep.ranges import listed, unlisted


@pytest.mark.parametrize("ranks", [[], [3], [0, 1, 2, 5, 8, 9], list(range(100))])
def test_ranks_are_spelled_and_read(ranks: list[int]) -> None:
    """There and back."""
    assert unlisted(listed(ranks)) == set(ranks)
