"""Waiting for a condition, with a limit."""

from __future__ import annotations

import itertools
import time

import pytest

from lockstep.waiting import BACKGROUND, FOREGROUND, Patience, wait_until

PATIENCE = pytest.mark.parametrize("patience", [FOREGROUND, BACKGROUND], ids=["fore", "back"])


@PATIENCE
def test_asked_at_least_once(patience: Patience) -> None:
    """With no time left the question is still asked."""
    assert wait_until(lambda: True, 0.0, patience)
    assert wait_until(lambda: True, -1.0, patience)
    assert not wait_until(lambda: False, 0.0, patience)


@PATIENCE
def test_asked_until_the_answer_comes(patience: Patience) -> None:
    """And not once more."""
    count = itertools.count()
    assert wait_until(lambda: next(count) == 1000, 60.0, patience)
    assert next(count) == 1001


@PATIENCE
def test_the_limit_is_kept(patience: Patience) -> None:
    """Not shorter, and not longer by more than a pause."""
    start = time.monotonic()
    assert not wait_until(lambda: False, 0.2, patience)
    assert time.monotonic() - start >= 0.2


def test_what_the_question_raises_comes_through() -> None:
    """Ctrl-C as well."""

    def ask() -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        wait_until(ask, 1.0)
