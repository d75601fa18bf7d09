"""One rank calls something else, or something wrong: all ranks learn which and what."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from helpers import wait
from lockstep import World
from lockstep.errors import CollectiveMismatch, RefusedByPeer

pytestmark = pytest.mark.ranks(2)
MODES = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


def _all_reduce(
    tensor: torch.Tensor, op: object = dist.ReduceOp.SUM
) -> Callable[[bool], dist.Work | None]:
    return lambda asynchronous: dist.all_reduce(tensor, op, async_op=asynchronous)


def _broadcast(root: int) -> Callable[[bool], dist.Work | None]:
    return lambda asynchronous: dist.broadcast(torch.ones(2), root, async_op=asynchronous)


# What most ranks call, what one rank calls, and how both are named.
CASES = {
    "verb": (
        _all_reduce(torch.ones(2)),
        lambda asynchronous: dist.barrier(async_op=asynchronous),
        r"all_reduce #\d+ \(float32\[2\], SUM\)",
        r"barrier #\d+",
    ),
    "shape": (
        _all_reduce(torch.ones(2)),
        _all_reduce(torch.ones(3)),
        r"float32\[2\]",
        r"float32\[3\]",
    ),
    "dtype": (
        _all_reduce(torch.ones(2)),
        _all_reduce(torch.ones(2, dtype=torch.int32)),
        "float32",
        "int32",
    ),
    "operator": (
        _all_reduce(torch.ones(2)),
        _all_reduce(torch.ones(2), dist.ReduceOp.MAX),
        "SUM",
        "MAX",
    ),
    "root": (_broadcast(0), _broadcast(1), "root 0", "root 1"),
}


@MODES
@pytest.mark.parametrize("case", CASES)
def test_different_calls(world: World, case: str, asynchronous: bool) -> None:
    """Every rank in turn is the odd one; the group is usable afterwards."""
    common, odd, common_text, odd_text = CASES[case]
    for who in range(world.size):
        with pytest.raises(CollectiveMismatch) as caught:
            wait((odd if world.rank == who else common)(asynchronous))
        text = str(caught.value)
        if world.size > 2:
            pattern = rf"rank {who} called [^;]*{odd_text}.* the others called .*{common_text}"
        else:
            pattern = f"{odd_text}|{common_text}"
        _expect(pattern, text)
        _expect(odd_text, text)
        _expect(common_text, text)
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor.item() == world.size


def _expect(pattern: str, text: str) -> None:
    assert re.search(pattern, text), f"{pattern!r} is not in:\n{text}"


@MODES
def test_one_rank_has_a_bad_argument(world: World, asynchronous: bool) -> None:
    """The bad rank raises its own TypeError; the others a TypeError that names it. At once."""
    for who in range(world.size):
        dtype = torch.float8_e4m3fn if world.rank == who else torch.float32
        with pytest.raises(TypeError, match="float8_e4m3fn") as caught:
            wait(dist.all_reduce(torch.zeros(2, dtype=dtype), async_op=asynchronous))
        if world.rank != who:
            assert isinstance(caught.value, RefusedByPeer)
            assert f"rank {who} of the group refused its all_reduce" in str(caught.value)
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor.item() == world.size


def test_one_rank_has_lists_of_the_wrong_length(world: World) -> None:
    """A ValueError on one rank is a ValueError on all."""
    count = world.size + 1 if world.rank == 1 else world.size
    with pytest.raises(ValueError, match=f"{world.size + 1} output tensors"):
        dist.all_gather([torch.zeros(1) for _ in range(count)], torch.zeros(1))
    whole = torch.zeros(world.size + 1 if world.rank == 0 else world.size)
    with pytest.raises((ValueError, RuntimeError), match=r"does not divide|divide equally"):
        dist.all_to_all_single(whole.clone(), whole)
    dist.barrier()


def test_splits_that_do_not_fit(world: World) -> None:
    """Rank 0 gives rank 1 two rows; rank 1 expects one."""
    given, taken = [1] * world.size, [1] * world.size
    if world.rank == 0:
        given[1] = 2
    with pytest.raises(CollectiveMismatch, match=r"rank 1 expects: 4 bytes from rank 0.*gives 8"):
        dist.all_to_all_single(torch.zeros(sum(taken)), torch.zeros(sum(given)), taken, given)
    dist.barrier()


def test_every_rank_calls_another_verb(world: World) -> None:
    """No majority: still an error on all."""
    with pytest.raises(CollectiveMismatch):
        dist.all_reduce(torch.zeros(world.rank + 1))
    dist.barrier()
