"""What once broke: each of these gave a wrong result, a hang or a crash."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from helpers import alarm, new_group
from lockstep import World
from lockstep.errors import GroupBroken


@pytest.mark.parametrize("count", [3, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32], ids=str)
def test_contiguous_on_one_rank_only(world: World, dtype: torch.dtype, count: int) -> None:
    """How a tensor lies in memory must not decide by which way this rank sums."""
    for operator in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        for odd in range(world.size):
            base = torch.arange(count * count).reshape(count, count) % 7
            mine = base.to(dtype).t()
            if world.rank != odd:
                mine = mine.contiguous()
            dist.all_reduce(mine, op=operator)
            factor = world.size if operator == dist.ReduceOp.SUM else 1
            assert torch.equal(mine, (base.t() * factor).to(dtype))


@pytest.mark.ranks(2)
def test_a_verb_that_an_exception_leaves_breaks_its_group(world: World) -> None:
    """The others count on this rank; going on, it would answer the next call with this one."""
    group = new_group()
    dist.all_reduce(torch.ones(1), group=group)
    if world.rank == 0:
        with alarm():
            dist.all_reduce(torch.ones(3), group=group)
        with pytest.raises(GroupBroken, match="was left by _Alarm"):
            dist.all_reduce(torch.ones(3), group=group)
    world.comm.Barrier()


def test_a_callback_may_call_a_verb(world: World) -> None:
    """It runs in the thread that carries verbs out, and must not wait for that thread."""
    inner = torch.ones(2)
    first = dist.all_reduce(torch.ones(200_000), async_op=True)
    assert first is not None
    done = first.get_future().then(lambda _: dist.all_reduce(inner))
    last = dist.all_reduce(torch.ones(1), async_op=True)
    assert last is not None
    done.wait()
    last.wait()
    assert inner.tolist() == [world.size] * 2


@pytest.mark.ranks(2)
def test_overlapping_elements_are_refused(world: World) -> None:
    """Before anything moves, on all ranks, by every verb that writes."""
    odd = torch.zeros(1).expand(4)
    with pytest.raises(ValueError, match="several of its elements lie at one place"):
        dist.all_reduce(odd)
    with pytest.raises(ValueError, match="several of its elements lie at one place"):
        dist.all_gather_into_tensor(torch.zeros(1).expand(world.size), torch.zeros(1))
    dist.all_reduce(torch.ones(1).expand(1))


@pytest.mark.ranks(2)
def test_a_fork_is_not_the_rank(world: World) -> None:
    """A child may end; it may not call verbs in its parent's place."""
    dist.all_reduce(torch.ones(1))
    child = os.fork()
    if child == 0:
        try:
            dist.all_reduce(torch.ones(1))
        except GroupBroken as error:
            os._exit(7 if "fork" in str(error) else 8)
        os._exit(9)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    dist.all_reduce(torch.ones(1))


@pytest.mark.ranks(2)
def test_memory_is_shared_without_a_name(world: World) -> None:
    """Nothing in /dev/shm bears our name while a group sums through shared memory."""
    before = _ours()
    group = new_group()
    for _ in range(3):
        dist.all_reduce(torch.ones(50_000), group=group)
    assert _ours() <= before


def _ours() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "lockstep" in name}
