"""A rank that does not come: the others raise in time, and say which verb of which group."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI

from helpers import new_group, wait
from lockstep import World
from lockstep.errors import CollectiveTimeout, GroupBroken

pytestmark = pytest.mark.ranks(2)
SECONDS = 1.0


@pytest.fixture
def group(comm: MPI.Intracomm) -> Iterator[dist.ProcessGroup]:
    """Open a group of all ranks with a short timeout."""
    group = new_group(timeout=timedelta(seconds=SECONDS))
    comm.Barrier()
    yield group
    comm.Barrier()
    # At the process's end a broken group limits how long MPI may take to end: leave it time.
    dist.set_timeout(timedelta(seconds=30), group)
    dist.destroy_process_group(group)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_rank_never_comes(world: World, group: dist.ProcessGroup, asynchronous: bool) -> None:
    """The verdict names verb, number, group and rank; later verbs say that the group is broken."""
    dist.all_reduce(torch.zeros(1), group=group)
    if world.rank == world.size - 1:
        return
    start = time.monotonic()
    with pytest.raises(CollectiveTimeout) as caught:
        wait(dist.all_reduce(torch.zeros(2), group=group, async_op=asynchronous))
    assert SECONDS <= time.monotonic() - start < SECONDS + 1
    text = str(caught.value)
    assert "all_reduce #2 (float32[2], SUM)" in text
    assert f"on group '{group.group_name}'" in text
    assert f"rank {world.rank} of {world.size}" in text
    assert "timeout of 1 s" in text
    for verb in (dist.barrier, lambda group: dist.broadcast(torch.zeros(1), 0, group=group)):
        with pytest.raises(GroupBroken, match="all_reduce #2 timed out"):
            verb(group=group)
    with pytest.raises(GroupBroken):
        dist.send(torch.zeros(1), (world.rank + 1) % world.size, group=group)


def test_other_groups_go_on(world: World, group: dist.ProcessGroup) -> None:
    """A broken group does not break the others."""
    if world.rank != 0:
        with pytest.raises(CollectiveTimeout):
            dist.barrier(group=group)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == world.size


def test_set_timeout(world: World, group: dist.ProcessGroup) -> None:
    """The new limit holds for the verbs that follow."""
    dist.set_timeout(timedelta(seconds=0.25), group)
    if world.rank == world.size - 1:
        return
    start = time.monotonic()
    with pytest.raises(CollectiveTimeout, match=r"timeout of 0\.25 s"):
        dist.barrier(group=group)
    assert 0.25 <= time.monotonic() - start < 1.25


@pytest.mark.parametrize("all_ranks", [False, True], ids=["first", "all"])
def test_monitored_barrier_names_who_is_missing(
    world: World, group: dist.ProcessGroup, all_ranks: bool
) -> None:
    """Only rank 0 comes: it names rank 1, or all others."""
    if world.rank != 0:
        return
    start = time.monotonic()
    who = ", ".join(str(rank) for rank in range(1, world.size)) if all_ranks else "1"
    with pytest.raises(RuntimeError, match=rf"Ranks? {who} failed to pass"):
        dist.monitored_barrier(group, timedelta(seconds=SECONDS), wait_all_ranks=all_ranks)
    assert time.monotonic() - start < SECONDS + 1


@pytest.mark.ranks(3)
def test_monitored_barrier_tells_all_that_came(world: World, group: dist.ProcessGroup) -> None:
    """The last rank is missing: rank 0 and those between learn of it."""
    if world.rank == world.size - 1:
        return
    with pytest.raises(CollectiveTimeout, match=rf"(?i)rank {world.size - 1} (failed|did not)"):
        dist.monitored_barrier(group, timedelta(seconds=SECONDS))


def test_monitored_barrier(world: World) -> None:
    """When all come, it is a barrier; many times."""
    for _ in range(20):
        dist.monitored_barrier(timeout=timedelta(seconds=20))
    dist.monitored_barrier(wait_all_ranks=True)


def test_a_receive_is_taken_back(world: World, group: dist.ProcessGroup) -> None:
    """After the timeout of a recv other traffic goes on, and a later message is not lost."""
    after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    target = torch.zeros(1)
    with pytest.raises(CollectiveTimeout, match=rf"recv .*from rank {before}.*timeout of 1 s"):
        dist.recv(target, before, group=group)
    dist.barrier(group=group)
    assert target.item() == 0.0
    work = dist.isend(torch.tensor([world.rank + 1.0]), after, group=group)
    dist.recv(target, before, group=group)
    assert target.item() == before + 1.0
    wait(work)


def test_a_rank_does_not_open_a_group(world: World, no_group: None) -> None:
    """The rank that waits names the one that does not come."""
    dist.init_process_group("mpi", timeout=timedelta(seconds=20))
    if world.rank == 0:
        with pytest.raises(CollectiveTimeout, match=r"opening group .*rank 1"):
            dist.new_group([0, 1], timedelta(seconds=SECONDS))
    dist.barrier()
