"""Asynchronous verbs: they return at once, keep their order, and end together."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lockstep import World
from lockstep.errors import CollectiveTimeout


def start(tensor: torch.Tensor) -> dist.Work:
    """Start an all_reduce."""
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    return work


def tell(world: World) -> None:
    """Let the last rank go on: called by rank 0."""
    world.comm.send("go on", world.size - 1)


def hear(world: World) -> None:
    """Wait for rank 0: called by the last rank."""
    assert world.comm.recv(source=0) == "go on"


@pytest.mark.ranks(2)
def test_returns_before_the_last_rank_has_come(world: World) -> None:
    """The last rank comes only after rank 0 has got its Work and told it so."""
    tensor = torch.full((1000,), world.rank + 1.0)
    if world.rank == world.size - 1:
        hear(world)
    work = start(tensor)
    if world.rank == 0:
        assert not work.is_completed()
        assert tensor[0].item() == 1.0
        tell(world)
    work.wait()
    assert work.is_completed()
    assert tensor[-1].item() == sum(range(1, world.size + 1))


@pytest.mark.ranks(2)
def test_wait_with_a_timeout_can_be_repeated(world: World) -> None:
    """wait(timeout) gives up and leaves the verb going; a later wait succeeds."""
    tensor = torch.ones(3)
    if world.rank == world.size - 1:
        hear(world)
    work = start(tensor)
    if world.rank == 0:
        with pytest.raises(CollectiveTimeout, match=r"all_reduce.*0\.1 s"):
            work.wait(timedelta(seconds=0.1))
        assert not work.is_completed()
        tell(world)
    assert work.wait(timedelta(seconds=20))
    assert tensor.tolist() == [float(world.size)] * 3


def test_many_in_flight_end_in_order(world: World) -> None:
    """When one is over, all before it are; the sums are right."""
    tensors = [torch.full((3,), float(world.rank + i)) for i in range(500)]
    works = [start(tensor) for tensor in tensors]
    for at in (100, 499):
        works[at].wait()
        assert all(work.is_completed() for work in works[: at + 1])
    total = sum(range(world.size))
    assert [t[0].item() for t in tensors] == [total + i * world.size for i in range(500)]


def test_mixed_verbs_keep_their_order(world: World) -> None:
    """A synchronous verb comes after what was queued before it, on the same tensor too."""
    tensor = torch.full((4,), 1.0)
    works = [start(tensor) for _ in range(5)]
    dist.all_reduce(tensor)
    assert tensor.tolist() == [float(world.size) ** 6] * 4
    assert all(work.is_completed() for work in works)
    gathered = [torch.zeros(4) for _ in range(world.size)]
    first = dist.broadcast(tensor, 0, async_op=True)
    second = dist.all_gather(gathered, tensor, async_op=True)
    assert first is not None
    assert second is not None
    second.wait()
    assert first.is_completed()
    assert torch.equal(gathered[-1], tensor)


def test_future_and_then(world: World) -> None:
    """get_future() holds the tensors; then() gets them when they are final."""
    tensor = torch.full((2,), world.rank + 1.0)
    future = start(tensor).get_future()
    halves = future.then(lambda done: done.value()[0] / 2)
    total = sum(range(1, world.size + 1))
    assert halves.wait().tolist() == [total / 2] * 2
    assert future.done()
    assert future.value()[0] is not None
    # Asked for again when all is over, it is done at once.
    late = dist.all_reduce(torch.ones(1), async_op=True)
    assert late is not None
    late.wait()
    assert late.get_future().done()
    assert late.get_future().value()[0].item() == world.size


def test_futures_of_all_verbs_hold_tensors(world: World) -> None:
    """Whoever chains on a future finds the result there."""
    mine = torch.full((2,), float(world.rank))
    whole = torch.zeros(2 * world.size)
    work = dist.all_gather_single(whole, mine, async_op=True)
    assert work is not None
    work.get_future().wait()
    assert whole.view(-1, 2)[:, 0].tolist() == [float(r) for r in range(world.size)]
    outputs = [torch.zeros(2) for _ in range(world.size)]
    work = dist.all_gather(outputs, mine, async_op=True)
    assert work is not None
    work.get_future().wait()
    assert [o[0].item() for o in outputs] == [float(r) for r in range(world.size)]


def test_the_tensor_is_kept_alive(world: World) -> None:
    """The caller may drop its tensors while a verb is under way."""
    for _ in range(20):
        work = start(torch.full((100_000,), 1.0))
    last = torch.full((100_000,), 1.0)
    work = start(last)
    work.wait()
    assert last[-1].item() == world.size


def test_coalesced_asynchronous_works(world: World) -> None:
    """The manager's wait is for all of them."""
    tensors = [torch.full((2,), float(i)) for i in range(10)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    assert [t[0].item() for t in tensors] == [float(i * world.size) for i in range(10)]


@pytest.mark.ranks(2)
def test_a_failure_comes_out_of_wait(world: World) -> None:
    """An asynchronous verb that fails raises in wait() and can be asked for what failed."""
    wrong = world.rank == world.size - 1
    tensor = torch.zeros(3 if wrong else 2)
    work = start(tensor)
    with pytest.raises(RuntimeError, match="did not call the same"):
        work.wait()
    assert work.is_completed()
    assert not work.is_success()
    assert "did not call the same" in str(work.exception())
    future = start(torch.zeros(1)).get_future()
    future.wait()
    dist.barrier()


@pytest.mark.ranks(2)
def test_a_failure_comes_out_of_the_future(world: World) -> None:
    """Also for C++: DDP, whose ranks differ, raises in backward and does not crash."""
    wrong = world.rank == world.size - 1
    future = start(torch.zeros(3 if wrong else 2)).get_future()
    with pytest.raises(RuntimeError, match="did not call the same"):
        future.wait()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
    loss = model(torch.ones(1, 3)).sum()
    with pytest.raises(RuntimeError, match="did not call the same"):
        dist.all_reduce(torch.zeros(2)) if wrong else loss.backward()
    dist.barrier()
