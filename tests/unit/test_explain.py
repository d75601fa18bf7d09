"""The verdict on calls that differ."""

from __future__ import annotations

from lockstep.errors import CollectiveMismatch, RefusedByPeer
from lockstep.mpi_backend.agreement import explain


def test_one_rank_differs() -> None:
    """It is named, with its call and that of the others."""
    error = explain(["a (x)", "a (x)", "b (y)", "a (x)"], [False] * 4)
    assert isinstance(error, CollectiveMismatch)
    assert "rank 2 called b (y), where the others called a (x)" in str(error)


def test_two_ranks_differ_from_each_other() -> None:
    """Without a majority the common call is that of a rank with a name."""
    text = str(explain(["a", "b"], [False, False]))
    assert "rank 1 called b, where rank 0 called a" in text


def test_many_differ() -> None:
    """The list is cut, and says so."""
    text = str(explain(["a"] * 12 + [f"b{i}" for i in range(10)], [False] * 22))
    assert "rank 19 called b7; and 2 others differ too" in text
    assert "b8" not in text


def test_a_refusal_comes_first() -> None:
    """Whoever refused its own arguments is the cause, whatever the others called."""
    texts = ["a #1", "b #1", "a #1 refused: TypeError: no such dtype"]
    error = explain(texts, [False, False, True])
    assert isinstance(error, RefusedByPeer)
    assert "rank 2 of the group refused its a #1: TypeError: no such dtype" in str(error)
