"""The compiled kernel between processes: many calls, late ranks, ranks that are killed or stopped.

The processes are forks of this one that share memory; there is no MPI, so that one of them can end
without the others being ended.
"""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from lockstep import kernel
from lockstep.meeting import Late, Meeting, Process, this_process

DTYPES = list(kernel.DTYPES)
PLACE = 4096
LONGEST = 20_000
# The limit of a wait, and how long its verdict may take beyond it on a loaded machine.
LIMIT, GRACE = 1.0, 20.0
_fork = multiprocessing.get_context("fork")


class Rank:
    """One rank: its place to meet, and memory that all ranks see.

    A part of the memory is a window of LONGEST float64, then a place of two sides.
    """

    def __init__(self, shared: mmap.mmap, rank: int, processes: list[Process]) -> None:
        self.library = kernel.library()
        self.rank, self.size = rank, len(processes)
        base = ctypes.addressof(ctypes.c_char.from_buffer(shared))
        self._start = Meeting.bytes_needed(self.library, self.size)
        self._shared = shared
        self.meeting = Meeting(self.library, base, rank, processes)
        self._windows = [base + self._start + r * part_bytes() for r in range(self.size)]
        self._places = kernel.pointers([at + 8 * LONGEST for at in self._windows])

    def window(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        """Return this rank's window as a tensor."""
        at = self._start + self.rank * part_bytes()
        return torch.frombuffer(self._shared, dtype=dtype, count=count, offset=at)

    def call(self, verb: str, data: torch.Tensor, seconds: float, eager: bool) -> None:
        """Sum or copy data over all ranks; see `check` for what comes out."""
        library, n, code = self.library, self.size, kernel.DTYPES[data.dtype]
        signature, nbytes = hash((len(verb), len(data), code)) & (2**62 - 1), data.nbytes
        head: tuple[Any, ...] = (signature, 1, seconds, eager)
        staged = (self._places, PLACE, data.data_ptr())
        run = self.meeting.call
        if verb == "window":
            head = (signature, 2, seconds, eager)
            addresses = kernel.pointers(self._windows)
            same = run(library.lockstep_windows, *head, addresses, len(data), code, n)
        elif verb == "sum" and nbytes <= PLACE:
            same = run(library.lockstep_small, *head, *staged, len(data), code)
        elif verb == "sum":
            head = (signature, -(-nbytes // PLACE) + 1, seconds, eager)
            same = run(library.lockstep_staged, *head, *staged, len(data), code)
        elif verb == "broadcast":
            head = (signature, max(1, -(-nbytes // PLACE)), seconds, eager)
            same = run(library.lockstep_broadcast, *head, *staged, nbytes, n - 1)
        elif verb == "gather":
            out = torch.zeros(n, len(data), dtype=data.dtype)
            head = (signature, max(1, -(-nbytes // PLACE)), seconds, eager)
            rows = kernel.pointers([row.data_ptr() for row in out])
            same = run(library.lockstep_gather, *head, *staged, nbytes, rows)
            data.copy_(out.sum(0))
        else:
            count = len(data) // n
            each = PLACE // n // 64 * 64 // data.itemsize
            head = (signature, max(1, -(-count // each)), seconds, eager)
            part = data[self.rank * count : (self.rank + 1) * count]
            same = run(library.lockstep_scatter, *head, *staged, part.data_ptr(), count, code)
            data.copy_(torch.cat([part] * n)[: len(data)].clone() if count else data)
        assert same


VERBS = ["window", "sum", "broadcast", "gather", "scatter", "sum"]


def part_bytes() -> int:
    """Return the bytes of a rank's part: the window, then the place with two sides."""
    return 8 * LONGEST + 2 * PLACE


def run_ranks(
    size: int, body: Callable[[Rank, Connection], None]
) -> tuple[list[Any], list[Connection]]:
    """Start forks of this process that run the body as ranks of one node."""
    library = kernel.library()
    if library is None:
        pytest.skip("no compiled kernel here: the package was built without a C compiler")
    shared = mmap.mmap(-1, Meeting.bytes_needed(library, size) + size * part_bytes())
    ends = [_fork.Pipe() for _ in range(size)]

    def enter(rank: int) -> None:
        torch.set_num_threads(1)
        own = ends[rank][1]
        own.send(this_process())
        body(Rank(shared, rank, own.recv()), own)

    ranks = [_fork.Process(target=enter, args=(rank,), daemon=True) for rank in range(size)]
    for rank in ranks:
        rank.start()
    pipes = [ours for ours, _ in ends]
    processes = [pipe.recv() for pipe in pipes]
    for pipe in pipes:
        pipe.send(processes)
    return ranks, pipes


def end(ranks: list[Any]) -> None:
    """End the forks, and wait for their ends."""
    for rank in ranks:
        rank.kill()
        rank.join(GRACE)


def check(verb: str, data: torch.Tensor, start: int, size: int) -> None:
    """Compare what came out with what must: each rank had put in start + rank everywhere."""
    total = size * start + sum(range(size))
    expected = start + size - 1 if verb == "broadcast" else total
    assert bool((data == expected).all()), (verb, data.dtype, len(data), data[:4], expected)


def many_calls(size: int, calls: int, longest: float) -> Callable[[Rank, Connection], None]:
    """Call random verbs on random lengths and dtypes; random ranks are late."""

    def body(rank: Rank, pipe: Connection) -> None:
        common, own = random.Random(size), random.Random(1000 * size + rank.rank)
        for call in range(calls):
            verb, dtype = common.choice(VERBS), common.choice(DTYPES)
            # Mostly short ones, some of many blocks; those of scatter divide by the ranks.
            count = min(int(2 ** common.uniform(0, longest)), LONGEST // size * size)
            count = max(count // size, 1) * size
            late, eager, start = common.randrange(40), common.random() < 0.5, call % 5
            data = rank.window(dtype, count) if verb == "window" else torch.empty(count).to(dtype)
            data.fill_(start + rank.rank)
            if late % size == rank.rank and late < size:
                for _ in range(own.randrange(3000)):
                    pass
            rank.call(verb, data, 60.0, eager)
            check(verb, data, start, size)
        pipe.send("done")

    return body


# The last number: the longest, as a power of two.
@pytest.mark.parametrize(
    ("size", "calls", "longest"),
    [(2, 100_000, 10.0), (2, 4000, 14.3), (3, 4000, 14.3), (5, 2500, 14.3), (8, 1500, 14.3)],
)
def test_many_calls(size: int, calls: int, longest: float) -> None:
    """Random verbs, sizes, dtypes and pauses: whatever comes out is right, and nobody hangs."""
    ranks, pipes = run_ranks(size, many_calls(size, calls, longest))
    try:
        for pipe in pipes:
            assert pipe.poll(300.0), "a rank hangs"
            assert pipe.recv() == "done"
    finally:
        end(ranks)


def test_numbers_begin_again_at_zero() -> None:
    """After 2^32 epochs: nobody takes the small numbers for old ones."""

    def body(rank: Rank, pipe: Connection) -> None:
        first = 2**32 - 40
        epoch = ctypes.c_uint32.from_address(rank.meeting._team.slots + rank.rank * slot)
        epoch.value = rank.meeting._epoch = first
        if rank.rank == 0:
            gate = rank.meeting._team.slots + rank.size * slot
            ctypes.c_uint32.from_address(gate).value = first
        pipe.send("ready")
        pipe.recv()
        rank.meeting._epoch = first + 1
        for call in range(60):
            verb = VERBS[call % len(VERBS)]
            count = (3, 300, 3000)[call % 3]
            data = rank.window(torch.float32, count) if verb == "window" else torch.empty(count)
            data.fill_(call + rank.rank)
            rank.call(verb, data, 60.0, call % 2 == 0)
            check(verb, data, call, rank.size)
        assert rank.meeting._epoch < 2**31
        pipe.send("done")

    library = kernel.library()
    slot = library.lockstep_slot_bytes() if library else 0
    ranks, pipes = run_ranks(3, body)
    try:
        for pipe in pipes:
            assert pipe.poll(GRACE)
            assert pipe.recv() == "ready"
        for pipe in pipes:
            pipe.send("go")
        for pipe in pipes:
            assert pipe.poll(60.0), "a rank hangs"
            assert pipe.recv() == "done"
    finally:
        end(ranks)


def test_hundred_thousand_meetings() -> None:
    """Bare meetings in a row, in which ranks take turns in being late."""

    def body(rank: Rank, pipe: Connection) -> None:
        own = random.Random(rank.rank)
        for call in range(100_000):
            if own.random() < 0.01:
                os.sched_yield()
            assert rank.meeting.meet(call, 60.0, call % 2 == 0)
        pipe.send("done")

    ranks, pipes = run_ranks(3, body)
    try:
        for pipe in pipes:
            assert pipe.poll(300.0), "a rank hangs"
            assert pipe.recv() == "done"
    finally:
        end(ranks)


def until_one_is_missing(rank: Rank, pipe: Connection) -> None:
    """Sum over and over; tell who did not come, how it is known, and how long that took."""
    pipe.send("ready")
    common = random.Random(3)
    while True:
        verb, count = common.choice(VERBS), common.choice([rank.size, 2 * rank.size, 9000])
        data = rank.window(torch.float32, count) if verb == "window" else torch.empty(count)
        data.fill_(1.0)
        start = time.monotonic()
        try:
            rank.call(verb, data, LIMIT, True)
        except Late as late:
            pipe.send((late.rank, late.gone, time.monotonic() - start))
            return


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_lost_at_any_moment_is_named(how: signal.Signals) -> None:
    """A dozen random moments each: the others name it, a dead one well before the limit."""
    moments = random.Random(int(how))
    for number in range(12):
        ranks, pipes = run_ranks(3, until_one_is_missing)
        try:
            lost = number % 3
            for pipe in pipes:
                assert pipe.poll(GRACE)
                assert pipe.recv() == "ready"
            end_of_pause = time.monotonic() + moments.uniform(0.0, 0.05)
            while time.monotonic() < end_of_pause:
                pass
            os.kill(ranks[lost].pid, how)
            for rank, pipe in enumerate(pipes):
                if rank == lost:
                    continue
                assert pipe.poll(LIMIT + GRACE), f"rank {rank} waits for ever"
                who, gone, _ = pipe.recv()
                assert who == lost
                assert gone == (how is signal.SIGKILL)
        finally:
            end(ranks)
