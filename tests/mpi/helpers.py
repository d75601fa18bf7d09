"""What several of the tests need to call torch.distributed in a line."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep import World


def new_group(*arguments: Any, **named: Any) -> dist.ProcessGroup:
    """Open a group on a rank that is a member of it."""
    group = dist.new_group(*arguments, **named)
    assert isinstance(group, dist.ProcessGroup)
    return group


def wait(work: dist.Work | None) -> None:
    """Wait for what an asynchronous call has returned; a synchronous one returns nothing."""
    if work is not None:
        work.wait()


def split(world: World, sizes: Sequence[int]) -> World:
    """Return the world as if its ranks were on several nodes of so many ranks each.

    Only the grouping is another: what ranks of different nodes exchange goes by messages.
    """
    assert sum(sizes) == world.size
    node = next(i for i in range(len(sizes)) if world.rank < sum(sizes[: i + 1]))
    return dataclasses.replace(
        world,
        node=node,
        nodes=len(sizes),
        local_rank=world.rank - sum(sizes[:node]),
        local_size=sizes[node],
    )


def check_sum(world: World) -> None:
    """See that the ranks of the session are those of the world."""
    assert (dist.get_rank(), dist.get_world_size()) == (world.rank, world.size)
    tensor = torch.full((3,), float(world.rank + 1))
    dist.all_reduce(tensor)
    assert tensor.tolist() == [world.size * (world.size + 1) / 2] * 3


class _Alarm(Exception):
    pass


@contextmanager
def alarm() -> Iterator[None]:
    """Let a signal handler raise in the body of the ``with``, after 0.2 s; it has to come out."""

    def raise_alarm(number: int, frame: FrameType | None) -> None:
        raise _Alarm

    previous = signal.signal(signal.SIGALRM, raise_alarm)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(_Alarm):
            yield
    finally:
        signal.signal(signal.SIGALRM, previous)
