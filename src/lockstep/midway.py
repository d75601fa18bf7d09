"""Sums by several messages: what one has left midway, the next must not take for its own.

An exception may leave such a sum in the middle: a signal handler that raises, Ctrl-C, a timeout.
The other ranks still answer to it. A program that catches the exception and sums again would meet
their old messages, and add up numbers of two different sums.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from lockstep.errors import GroupBroken

_left: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def whole(function: Callable[..., None]) -> Callable[..., None]:
    """Let a sum over a group begin only if none before it has been left midway. Local.

    Args:
        function: of the buffer, the group (None: all ranks), and whatever else.

    Returns:
        the same, which raises GroupBroken on a group that an exception has left.
    """

    @functools.wraps(function)
    def run(flat: torch.Tensor, group: Any = None, *rest: Any, **named: Any) -> None:
        key = dist.group.WORLD if group is None else group
        if _left and key in _left:
            raise GroupBroken(
                f"{function.__name__}: an earlier sum on this group was left by {_left[key]}",
                needed="a group on which every sum has ended",
                cure="end the job and start it again, or open a new group",
            )
        try:
            function(flat, group, *rest, **named)
        except BaseException as error:
            _left[key] = type(error).__name__
            raise

    return run
