"""The errors: what they are, and that they survive being sent to another process."""

from __future__ import annotations

import inspect
import pickle

import pytest

from lockstep import errors

KINDS = [
    kind
    for kind in vars(errors).values()
    if inspect.isclass(kind) and issubclass(kind, errors.LockstepError)
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_pickled_and_back(kind: type[errors.LockstepError]) -> None:
    """Type, message and parts are kept."""
    error = kind("found this", needed="that", cure="do it")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == str(error)
    assert (copy.found, copy.needed, copy.cure) == ("found this", "that", "do it")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_caught_like_torch_s_own(kind: type[errors.LockstepError]) -> None:
    """torch raises RuntimeError."""
    assert issubclass(kind, RuntimeError)


def test_kinds_of_python() -> None:
    """An except clause for the usual kind of error finds them."""
    assert issubclass(errors.CollectiveTimeout, TimeoutError)
    assert issubclass(errors.RefusedByPeer, TypeError)
    assert issubclass(errors.RefusedByPeer, ValueError)


def test_message() -> None:
    """What was found, what is needed, what to do; nothing empty."""
    full = str(errors.LaunchError("one", needed="two", cure="three"))
    assert full == "one\n  needed: two\n  to do:  three"
    assert str(errors.LaunchError("one")) == "one"
