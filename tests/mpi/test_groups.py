"""Groups of some ranks, groups of other backends, and the life of a group."""

from __future__ import annotations

import gc
import itertools
import os
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.distributed.distributed_c10d import GroupName

from helpers import new_group
from lockstep import World
from lockstep.errors import GroupBroken


def total(group: dist.ProcessGroup | None = None, value: float = 1.0) -> float:
    """Return the sum of a number over a group."""
    tensor = torch.tensor([value])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def test_every_subset(world: World) -> None:
    """Members only take part; the numbers of the ranks are those of the group."""
    for count in range(1, world.size + 1):
        for ranks in itertools.combinations(range(world.size), count):
            group = dist.new_group(list(ranks))
            if world.rank not in ranks:
                assert group is dist.GroupMember.NON_GROUP_MEMBER
                continue
            assert isinstance(group, dist.ProcessGroup)
            assert dist.get_rank(group) == ranks.index(world.rank)
            assert total(group, world.rank + 1.0) == sum(ranks) + count
            tensor = torch.tensor([world.rank])
            dist.broadcast(tensor, ranks[-1], group=group)
            assert tensor.item() == ranks[-1]
            dist.destroy_process_group(group)
    dist.barrier()


@pytest.mark.ranks(2)
def test_ranks_outside_go_on(
    world: World, comm: MPI.Intracomm, tmp_path: Path, no_group: None
) -> None:
    """The group is made and used while the last rank is elsewhere: it is told afterwards.

    torch allows this under the long name only.
    """
    _open_by_device("cpu:mpi", world, tmp_path)
    last = world.size - 1
    if world.rank == last:
        assert comm.recv(source=0) == "done"
    else:
        group = new_group(list(range(last)), use_local_synchronization=True)
        assert total(group) == last
        dist.destroy_process_group(group)
        if world.rank == 0:
            comm.send("done", last)
    dist.barrier()


@pytest.mark.ranks(2)
def test_overlapping_groups_at_the_same_time(world: World) -> None:
    """Works of several groups are under way together."""
    groups = [new_group() for _ in range(3)]
    tensors = [torch.full((1000,), float(i)) for i in range(30)]
    works = [
        dist.all_reduce(tensor, group=groups[i % 3], async_op=True)
        for i, tensor in enumerate(tensors)
    ]
    for work in reversed(works):
        assert work is not None
        work.wait()
    assert [t[-1].item() for t in tensors] == [float(i * world.size) for i in range(30)]
    for group in groups:
        dist.destroy_process_group(group)


def test_gloo_beside_it(world: World) -> None:
    """A group of torch's gloo with the bare name "mpi" as the default."""
    group = new_group(backend="gloo", timeout=timedelta(seconds=20))
    assert dist.get_backend(group) == "gloo"
    assert total(group, world.rank + 1.0) == sum(range(1, world.size + 1))
    assert total() == world.size
    dist.destroy_process_group(group)


@pytest.mark.ranks(2)
def test_gloo_group_of_some_ranks(world: World) -> None:
    """Its members only take part."""
    group = dist.new_group([0, world.size - 1], backend="gloo", timeout=timedelta(seconds=20))
    if world.rank in (0, world.size - 1):
        assert isinstance(group, dist.ProcessGroup)
        assert total(group) == 2
    dist.barrier()


def test_split(world: World, tmp_path: Path, no_group: None) -> None:
    """ProcessGroup.split_group makes a group of some ranks of another, in their order.

    torch wants a store for it, so the default group has the long name.
    """
    _open_by_device("cpu:mpi", world, tmp_path)
    half = [rank for rank in reversed(range(world.size)) if rank % 2 == world.rank % 2]
    whole = dist.group.WORLD
    assert whole is not None
    group = whole.split_group(half, group_name=GroupName(f"half-{half[0]}"))
    assert group is not None
    tensor = torch.tensor([1.0])
    group.allreduce([tensor]).wait()
    assert tensor.item() == len(half)
    assert group.rank() == half.index(world.rank)
    group.shutdown()
    dist.barrier()


def test_names_and_numbers(world: World) -> None:
    """The backend's name, rank, size; the number of a group grows by one with every verb."""
    assert dist.get_backend() == "mpi"
    assert dist.get_rank() == world.rank
    assert dist.get_world_size() == world.size
    group: Any = new_group()
    assert group.name() == "mpi"
    before = group._get_sequence_number_for_group()
    total(group)
    dist.barrier(group=group)
    work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
    assert work is not None
    work.wait()
    assert group._get_sequence_number_for_group() == before + 3
    dist.destroy_process_group(group)


def test_destroyed_group_says_so(world: World) -> None:
    """A verb on a group that is closed raises."""
    group = new_group()
    dist.destroy_process_group(group)
    with pytest.raises((GroupBroken, ValueError)):
        total(group)


def test_opened_again(world: World, no_group: None) -> None:
    """init and destroy, several times, with works under way at the end."""
    for i in range(3):
        dist.init_process_group("mpi", timeout=timedelta(seconds=20))
        tensor = torch.tensor([float(i)])
        dist.all_reduce(tensor, async_op=True)
        dist.destroy_process_group()
        assert tensor.item() == i * world.size


@pytest.mark.parametrize("name", ["cpu:mpi", "cpu:mpi,cuda:gloo"])
def test_by_device_with_an_init_method(
    world: World, tmp_path: Path, no_group: None, name: str
) -> None:
    """The long name takes rank, size and a store, as torch's other backends do."""
    _open_by_device(name, world, tmp_path)
    assert total(None, 2.0) == 2.0 * world.size
    group = new_group(backend="gloo")
    assert total(group) == world.size
    dist.monitored_barrier(timeout=timedelta(seconds=20))


@pytest.mark.ranks(2)
def test_torch_was_told_another_rank(world: World, tmp_path: Path, no_group: None) -> None:
    """Ranks turned round against MPI's are refused on every rank."""
    with pytest.raises(RuntimeError, match=f"MPI says rank {world.rank} of {world.size}"):
        _open_by_device("cpu:mpi", world, tmp_path, (world.rank + 1) % world.size)


@pytest.mark.ranks(exactly=2)
@pytest.mark.limit(150)
def test_thousands_of_groups_leak_nothing(world: World) -> None:
    """Memory, threads and open files after 10,000 groups are those after the first thousand."""
    _open_and_close(1000)
    before = _resources()
    _open_and_close(9000)
    after = _resources()
    assert after["threads"] <= before["threads"]
    assert after["files"] <= before["files"]
    # 9,000 groups that each left 1 kB behind would make 9 MB.
    assert after["kilobytes"] - before["kilobytes"] < 4000


def test_a_group_that_was_used_leaves_no_thread(world: World) -> None:
    """The thread of a group's asynchronous verbs ends with the group."""
    _use_and_close()
    before = _resources()
    for _ in range(100):
        _use_and_close()
    assert _resources()["threads"] <= before["threads"]
    assert _resources()["files"] <= before["files"]


def _open_by_device(name: str, world: World, folder: Path, rank: int | None = None) -> None:
    file = world.comm.bcast(str(folder / "store"))
    dist.init_process_group(
        name,
        init_method=f"file://{file}",
        rank=world.rank if rank is None else rank,
        world_size=world.size,
        timeout=timedelta(seconds=20),
    )


def _open_and_close(count: int) -> None:
    for _ in range(count):
        dist.destroy_process_group(new_group())


def _use_and_close() -> None:
    group = new_group()
    work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
    assert work is not None
    work.wait()
    dist.destroy_process_group(group)


def _resources() -> dict[str, int]:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "kilobytes": pages * os.sysconf("SC_PAGE_SIZE") // 1024,
        "threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")),
    }
