"""Sums of buffers in memory that a node shares, and across nodes: exact, the same bits, ended."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI

from buffers import CPU, DTYPES, LENGTHS, bits, kinds_of, nodes_of, odd_numbers, open_reducer
from helpers import alarm, new_group, split
from lockstep import World, kernel, windows
from lockstep.errors import GroupBroken
from lockstep.reducers import make
from lockstep.replicas import own_group


@pytest.fixture(params=["mpi", "gloo"])
def group(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Open a group of all ranks over one backend."""
    made = new_group(backend=request.param)
    yield made
    dist.destroy_process_group(made)


def test_sums_are_exact(world: World, group: Any, way: str) -> None:
    """Small whole numbers, of all lengths, in whole buffers and in slices of them."""
    generator = torch.Generator().manual_seed(5)
    for sizes in nodes_of(world):
        place = split(world, sizes)
        for length in LENGTHS:
            reducer = open_reducer(place, group, length)
            for (dtype, _, _), buffer in zip(kinds_of(length), reducer.buffers, strict=True):
                everyone = torch.randint(-8, 9, (world.size, length), generator=generator)
                begin, end = (length // 3, length - length // 5) if length % 2 else (0, length)
                buffer.copy_(everyone[world.rank])
                reducer.sum(buffer[begin:end])
                expected = everyone[world.rank].clone()
                expected[begin:end] = everyone[:, begin:end].sum(0)
                assert torch.equal(buffer, expected.to(dtype)), (sizes, length, dtype)
            reducer.close()


def test_lengths_around_that_of_a_short_piece(world: World) -> None:
    """Where the kernel changes its way, and beside the cuts between ranks; at odd places, too."""
    group, generator = own_group(), torch.Generator().manual_seed(6)
    for sizes in nodes_of(world):
        reducer = open_reducer(split(world, sizes), group, 20_000)
        for (dtype, _, _), buffer in zip(kinds_of(20_000), reducer.buffers, strict=True):
            short, line = kernel.SMALL // dtype.itemsize, 64 // dtype.itemsize
            lengths = [short + by for by in (-1, 0, 1)]
            lengths += [world.size * line * 80 + by for by in (-line, -1, 0, 1, line)]
            for number, length in enumerate(lengths):
                everyone = torch.randint(-8, 9, (world.size, 20_000), generator=generator)
                buffer.copy_(everyone[world.rank])
                begin = number % 3
                reducer.sum(buffer[begin : begin + length])
                expected = everyone[world.rank].clone()
                expected[begin : begin + length] = everyone[:, begin : begin + length].sum(0)
                assert torch.equal(buffer, expected.to(dtype)), (sizes, length, dtype)
        reducer.close()


def test_more_ranks_than_the_kernel_adds_up_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then short pieces go as long ones do: as if so many ranks were too many."""
    if (library := kernel.library()) is None:
        pytest.skip("no compiled kernel here: the package was built without a C compiler")
    monkeypatch.setattr(windows, "LARGEST_TEAM", 0)
    monkeypatch.setattr(library, "lockstep_small", None)
    reducer = open_reducer(split(world, [world.size]), own_group(), 10)
    for buffer in reducer.buffers:
        buffer.fill_(world.rank)
        reducer.sum(buffer)
        assert bool((buffer == sum(range(world.size))).all())
    reducer.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("length", [3, 30_000])
@pytest.mark.parametrize("name", ["shared", "hierarchical", "ring"])
def test_a_sum_that_an_exception_leaves_is_the_last(world: World, name: str, length: int) -> None:
    """The others count on this rank; going on, it would answer the next sum with this one."""
    place = split(world, [1] * world.size if name == "hierarchical" else [world.size])
    reducer = make(name, kinds_of(length), place, new_group())
    reducer.sum(reducer.buffers[0])
    if world.rank == 0:
        with alarm():
            reducer.sum(reducer.buffers[0])
        for _ in range(2):
            with pytest.raises(GroupBroken, match=r"an earlier sum .*was left by _Alarm"):
                reducer.sum(reducer.buffers[0])
    world.comm.Barrier()


def test_same_bits_on_all_ranks_and_from_run_to_run(world: World, group: Any) -> None:
    """Numbers that every order of additions rounds in another way."""
    for sizes in nodes_of(world):
        place = split(world, sizes)
        for length in (3, 1025, 50_001):
            reducer = open_reducer(place, group, length)
            for (dtype, _, _), buffer in zip(kinds_of(length), reducer.buffers, strict=True):
                runs = []
                for _ in range(2):
                    buffer.copy_(odd_numbers(dtype, length, world.rank))
                    reducer.sum(buffer)
                    runs.append(bits(buffer))
                everyone = [torch.empty_like(runs[0]) for _ in range(world.size)]
                dist.all_gather(everyone, runs[0])
                assert torch.equal(runs[0], runs[1])
                assert all(torch.equal(runs[0], theirs) for theirs in everyone)
            reducer.close()


def test_compiled_and_torch_give_the_same_bits(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the real windows, and against the plain sum in the order of the ranks."""
    if kernel.library() is None:
        pytest.skip("no compiled kernel here: the package was built without a C compiler")
    group, length = own_group(), 20_011
    results = []
    for compiled in ("1", "0"):
        monkeypatch.setenv("LOCKSTEP_KERNEL", compiled)
        kernel.library.cache_clear()
        reducer = make("shared", kinds_of(length), split(world, [world.size]), group)
        for (dtype, _, _), buffer in zip(kinds_of(length), reducer.buffers, strict=True):
            buffer.copy_(odd_numbers(dtype, length, world.rank))
            reducer.sum(buffer)
            results.append(bits(buffer))
        reducer.close()
    monkeypatch.undo()
    kernel.library.cache_clear()
    for dtype, one, other in zip(DTYPES, results[:4], results[4:], strict=True):
        total = odd_numbers(dtype, length, 0)
        wide = total.to(torch.float32) if total.itemsize == 2 else total
        for rank in range(1, world.size):
            wide += odd_numbers(dtype, length, rank)
        assert torch.equal(one, other)
        assert torch.equal(one, bits(wide.to(dtype)))


def test_counts(world: World, group: Any) -> None:
    """Whole numbers, beyond what float32 holds."""
    for sizes in nodes_of(world):
        reducer = open_reducer(split(world, sizes), group, 10)
        for base in (0, 1, 2**40 + 1):
            assert reducer.count(base + world.rank) == sum(base + r for r in range(world.size))
        reducer.close()


@pytest.mark.limit(120)
def test_many_sums_with_late_ranks(world: World) -> None:
    """Random pieces and pauses, two reducers in turn: every sum is the right one."""
    group, calls = own_group(), 3000
    reducers = [open_reducer(split(world, [world.size]), group, 70_000) for _ in range(2)]
    common, own = torch.Generator().manual_seed(1), torch.Generator().manual_seed(world.rank + 9)
    for call in range(calls):
        which, kind, begin, length, late = (
            int(torch.randint(0, high, (), generator=common)) for high in (2, 4, 60_000, 2000, 50)
        )
        piece = reducers[which].buffers[kind][begin : begin + length]
        piece.fill_(call % 7 + world.rank)
        if late % world.size == world.rank:
            torch.randn(int(torch.randint(1, 20_000, (), generator=own)))  # takes its time
        reducers[which].sum(piece)
        assert bool((piece == world.size * (call % 7) + sum(range(world.size))).all())


def memory() -> int:
    """Return the bytes of this process; what several share counts as a part for each of them."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


@pytest.mark.parametrize("way_over", ["shared", "hierarchical"])
def test_memory_is_the_buffer_once(world: World, comm: Any, way_over: str) -> None:
    """All ranks together take their buffers, and at most 16 MB a rank besides."""
    group, count = own_group(), 12 * 2**20
    sizes = [world.size] if way_over == "shared" else [1] * world.size
    dist.all_reduce(torch.ones(100_000), group=group)  # what a first call needs is there
    comm.Barrier()
    before = comm.allreduce(memory())
    reducer = make(way_over, [(torch.float32, CPU, count)], split(world, sizes), group)
    for _ in range(2):
        for piece in reducer.buffers[0].split(2**20):
            piece.fill_(1.0)
            reducer.sum(piece)
    comm.Barrier()
    grown = comm.allreduce(memory()) - before
    # What else the process gives back meanwhile is little.
    assert 0.9 * 4 * count * world.size <= grown <= (4 * count + 16 * 10**6) * world.size
    comm.Barrier()
    reducer.close()


def test_two_at_once(world: World) -> None:
    """Two threads sum, each with a reducer of its own; their order differs from rank to rank."""
    one = split(world, [world.size])
    ways = [one, split(world, [1] * world.size)]
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        ways = [one, one]  # messages in two threads need more
    reducers = [open_reducer(way, own_group(), 5000) for way in ways]
    wrong: list[str] = []

    def work(number: int) -> None:
        own = torch.Generator().manual_seed(10 * world.rank + number)
        for call in range(200):
            piece = reducers[number].buffers[call % 4][: 10 + 23 * call]
            piece.fill_(world.rank + call % 3)
            if int(torch.randint(0, 10, (), generator=own)) == 0:
                torch.randn(20_000)
            reducers[number].sum(piece)
            expected = sum(range(world.size)) + world.size * (call % 3)
            if not bool((piece == expected).all()):
                wrong.append(f"reducer {number}, call {call}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
