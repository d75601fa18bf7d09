"""What no reducer can do is an error on all ranks that names the odd one, in time."""

from __future__ import annotations

import contextlib
import os
import resource
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from buffers import CPU, kinds_of
from helpers import new_group, split
from lockstep import World, kernel
from lockstep.errors import CollectiveMismatch, CollectiveTimeout, LockstepError
from lockstep.reducers import Reducer, make
from lockstep.replicas import own_group


@pytest.mark.ranks(2)
def test_a_rank_that_does_not_come_is_named(world: World) -> None:
    """Within the limit; afterwards nothing is summed any more."""
    for compiled in ("1", "0"):
        reducer = _limited(world, compiled)
        if world.rank != 1:
            with pytest.raises(CollectiveTimeout, match=r"(rank 1|some rank) has not come"):
                reducer.sum(reducer.buffers[0])
            with pytest.raises(LockstepError, match="did not come"):
                reducer.sum(reducer.buffers[0])
        world.comm.Barrier()
        reducer.close()


def _limited(world: World, compiled: str) -> Reducer:
    """Make a reducer whose sums have half a second."""
    os.environ["LOCKSTEP_KERNEL"] = compiled
    kernel.library.cache_clear()
    try:
        short = new_group(timeout=timedelta(seconds=0.5))
        return make("shared", kinds_of(100), split(world, [world.size]), short)
    finally:
        del os.environ["LOCKSTEP_KERNEL"]
        kernel.library.cache_clear()


@pytest.mark.ranks(2)
def test_a_fork_is_not_the_rank(world: World, way: str) -> None:
    """It has the rank's memory, but must not sum in its place."""
    reducer = make("shared", kinds_of(100), split(world, [world.size]), own_group())
    buffer = reducer.buffers[0]
    child = os.fork()
    if child == 0:
        try:
            reducer.sum(buffer)
        except LockstepError as error:
            os._exit(7 if "fork" in str(error) else 8)
        os._exit(9)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    buffer.fill_(1.0)
    reducer.sum(buffer)
    assert bool((buffer == world.size).all())


@pytest.mark.ranks(2)
def test_a_rank_that_cannot_load_the_kernel(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was built for another version: an error on all ranks, and none of them waits."""
    if kernel.library() is None:
        pytest.skip("no compiled kernel here: the package was built without a C compiler")
    group, other = own_group(), new_group()
    dist.all_reduce(torch.ones(1), group=group)
    if world.rank == 1:
        monkeypatch.setattr(kernel, "_VERSION", 0)
    kernel.library.cache_clear()
    try:
        with pytest.raises(LockstepError, match=r"kernel cannot be loaded .* of another version"):
            make("shared", kinds_of(10), split(world, [world.size]), group)
        with pytest.raises(LockstepError, match=r"kernel cannot be loaded .* of another version"):
            dist.all_reduce(torch.ones(1), group=other)
    finally:
        monkeypatch.undo()
        kernel.library.cache_clear()
    mine = torch.ones(1)
    dist.all_reduce(mine, group=other)
    assert mine.item() == world.size


@pytest.mark.ranks(2)
def test_a_rank_that_may_open_no_more_files(world: World) -> None:
    """It cannot share memory: all ranks are told why, and auto takes another way."""
    group, held = own_group(), []
    make("shared", kinds_of(10), split(world, [world.size]), group).close()  # all is loaded
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    for who in (0, 1):
        if world.rank == who:
            resource.setrlimit(resource.RLIMIT_NOFILE, (200, limits[1]))
            with contextlib.suppress(OSError):
                while True:
                    held.append(os.open(os.devnull, os.O_RDONLY))
        try:
            with pytest.raises(LockstepError, match=r"no memory to share .*: Too many open files"):
                make("shared", kinds_of(10), split(world, [world.size]), group)
            assert make("auto", kinds_of(10), split(world, [world.size]), group).name == "mpi"
        finally:
            for descriptor in held:
                os.close(descriptor)
            held.clear()
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.ranks(2)
def test_different_pieces_are_refused(world: World, way: str) -> None:
    """On all ranks, before anything is summed."""
    reducer = make("shared", kinds_of(100), split(world, [world.size]), own_group())
    buffer = reducer.buffers[0]
    buffer.fill_(1.0)
    with pytest.raises(CollectiveMismatch, match="not all ranks of the node sum the same piece"):
        reducer.sum(buffer[: 50 if world.rank == 1 else 60])
    assert bool((buffer == 1.0).all())


@pytest.mark.ranks(2)
def test_what_cannot_be_is_refused_on_all_ranks(world: World) -> None:
    """Shared over two nodes; more memory than there is; auto takes another way then."""
    group = own_group()
    two = split(world, [1, world.size - 1])
    with pytest.raises(LockstepError, match="the ranks are on 2 nodes"):
        make("shared", kinds_of(4), two, group)
    one = split(world, [world.size])
    huge = [(torch.float32, CPU, 2**45)]
    with pytest.raises(LockstepError, match=r"no memory to share for gradients .*memory are left"):
        make("shared", huge, one, group)
    assert make("auto", kinds_of(4), one, group).name == "shared"
    assert make("auto", kinds_of(4), two, group).name == "hierarchical"


@pytest.mark.ranks(2)
def test_buffers_of_other_lengths_are_refused(world: World) -> None:
    """On all ranks: the ranks would take each other's memory for something else."""
    length = 10 + 10_000 * (world.rank == 1)
    with pytest.raises(LockstepError, match="memory of different sizes for gradients: "):
        make("shared", kinds_of(length), split(world, [world.size]), own_group())
