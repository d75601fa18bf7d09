"""Threads and devices of a rank: the arithmetic, without the hardware."""

from __future__ import annotations

from lockstep.devices import lacking
from lockstep.threads import share


def test_ranks_that_share_cores_divide_them() -> None:
    """By the cores that they really share, on their own node; at least one thread."""
    everyone = [(0, range(8))] * 4 + [(1, range(8))] * 2
    assert [share(everyone, rank) for rank in range(6)] == [2, 2, 2, 2, 4, 4]
    assert share([(0, [0, 1])] * 5, 3) == 1


def test_ranks_that_are_bound_take_their_cores() -> None:
    """Cores of one's own are not divided."""
    everyone = [(0, [0, 1, 2, 3]), (0, [4, 5, 6, 7]), (0, [8])]
    assert [share(everyone, rank) for rank in range(3)] == [4, 4, 1]


def test_every_rank_has_a_gpu() -> None:
    """One visible each, or all visible and one a local rank; nodes do not share."""
    assert lacking([(0, 0, ["a"]), (0, 1, ["b"]), (1, 0, ["a"])]) == [None] * 3
    assert lacking([(0, 0, ["a", "b"]), (0, 1, ["a", "b"])]) == [None] * 2


def test_some_rank_has_none() -> None:
    """None is visible, too few are, or it is another rank's: each is named."""
    found = lacking([(0, 0, ["a", "b"]), (0, 1, ["a", "b"]), (0, 2, ["a", "b"]), (1, 0, [])])
    texts = [it.found if it else None for it in found]
    assert texts == [None, None, "2 GPUs for local rank 2", "no GPU is visible"]
    found = lacking([(0, 0, ["a"]), (0, 1, ["a"])])
    assert [it.found if it else None for it in found] == [None, "its GPU is that of rank 0"]
