"""Measure messages between two ranks: the time of one on its way, and many in flight.

The ways to measure are those of the OSU micro-benchmarks: latency is half of a round trip,
bandwidth that of a window of messages that the other side acknowledges once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lockstep.bench.bandwidth import algorithm_bandwidth
from lockstep.bench.collective import Clock, Row, Say
from lockstep.bench.measure import Sample, Told, compare_within, never
from lockstep.errors import LockstepError
from lockstep.world import World

PLAIN = "MPI_Send"
# Messages in flight, and how many bytes they may be together.
_WINDOW = 16
_BYTES = 128 * 2**20
_Call = Callable[[], object]


def partners(world: World) -> dict[str, int]:
    """Return the ranks that rank 0 exchanges messages with, by where they are. Collective."""
    nodes = world.comm.allgather(world.node)
    near = [rank for rank in range(1, world.size) if nodes[rank] == nodes[0]]
    far = [rank for rank in range(1, world.size) if nodes[rank] != nodes[0]]
    found = {"on the node": near[:1], "across nodes": far[:1]}
    return {where: ranks[0] for where, ranks in found.items() if ranks}


def measure(
    world: World,
    groups: dict[str, Any],
    lengths: Sequence[int],
    *,
    seconds: float,
    say: Say = lambda text: None,
    told: Told = never,
) -> tuple[list[Row], dict[str, str]]:
    """Measure messages of all lengths between rank 0 and a partner near and far. Collective.

    Args:
        world: the ranks; those that do not take part wait.
        groups: backend and group.
        lengths: in bytes, ascending.
        seconds: for all of it.
        say: told what is being measured.
        told: whether to stop before; what has not been measured by then is left out.

    Returns:
        rows, the same on all ranks; and what was left out, and why.
    """
    clock, rows, left_out = Clock(world, seconds, told), [], {}
    cases = [(where, peer, n) for n in lengths for where, peer in partners(world).items()]
    for i, (where, peer, nbytes) in enumerate(cases):
        left = clock.left()
        if left <= 0:
            left_out[f"from {nbytes} bytes {where}"] = clock.why
            break
        say(f"{nbytes} bytes {where}, {left:.0f} s left")
        calls = _calls(world, groups, peer, nbytes)
        samples = compare_within(world, calls, left / (len(cases) - i), told=told)
        rows += [_row(name, where, nbytes, sample) for name, sample in samples.items()]
    return rows, left_out


def _calls(world: World, groups: dict[str, Any], peer: int, nbytes: int) -> dict[str, _Call]:
    """Return the ping-pong and the window of each backend, checked once. Collective."""
    calls: dict[str, _Call] = {}
    out = torch.arange(251, dtype=torch.uint8).repeat(nbytes // 251 + 1)[:nbytes].clone()
    back = torch.zeros(window(nbytes), nbytes, dtype=torch.uint8)
    ways: dict[str, Any] = {PLAIN: _MPI(world), **{b: _Torch(g, b) for b, g in groups.items()}}
    for name, way in ways.items():
        mine, theirs = way.place(out), way.place(back)
        # Rank 0 has the first word; who is neither has nothing to do.
        roles = {0: (peer, True), peer: (0, False)}
        for kind, function in (("ping-pong", _ping_pong), ("window", _window)):
            if world.rank not in roles:
                calls[f"{name} {kind}"] = _nothing
                continue
            other, first = roles[world.rank]
            calls[f"{name} {kind}"] = function(way, mine, theirs, other, first)
        theirs.zero_()
        calls[f"{name} window"]()
        calls[f"{name} ping-pong"]()
        arrived = theirs[0] if world.rank == 0 else theirs
        wrong = world.rank in roles and bool((arrived != mine).any())
        if any(world.comm.allgather(wrong)):
            raise LockstepError(
                f"{name}: a message of {nbytes} bytes between ranks 0 and {peer} was changed",
                needed="what was sent",
                cure="do not use it here; run `make test-mpi`",
            )
    return calls


def _ping_pong(way: Any, out: torch.Tensor, back: torch.Tensor, peer: int, first: bool) -> _Call:
    def call() -> None:
        if first:
            way.send(out, peer)
            way.receive(back[0], peer)
        else:
            way.receive(back[0], peer)
            way.send(out, peer)

    return call


def _window(way: Any, out: torch.Tensor, back: torch.Tensor, peer: int, first: bool) -> _Call:
    token = way.place(torch.zeros(1, dtype=torch.uint8))

    def call() -> None:
        if first:
            way.finish([way.start_send(out, peer) for _ in back])
            way.receive(token, peer)
        else:
            way.finish([way.start_receive(row, peer) for row in back])
            way.send(token, peer)

    return call


class _Torch:
    """Messages of torch.distributed."""

    def __init__(self, group: Any, backend: str) -> None:
        self._group, self._gpu = group, backend == "nccl"

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cuda() if self._gpu else tensor.clone()

    def send(self, tensor: torch.Tensor, peer: int) -> None:
        dist.send(tensor, group=self._group, group_dst=peer)
        self._wait_for_gpu()

    def receive(self, tensor: torch.Tensor, peer: int) -> None:
        dist.recv(tensor, group=self._group, group_src=peer)
        self._wait_for_gpu()

    def start_send(self, tensor: torch.Tensor, peer: int) -> Any:
        return dist.isend(tensor, group=self._group, group_dst=peer)

    def start_receive(self, tensor: torch.Tensor, peer: int) -> Any:
        return dist.irecv(tensor, group=self._group, group_src=peer)

    def finish(self, works: Sequence[Any]) -> None:
        for work in works:
            work.wait()
        self._wait_for_gpu()

    def _wait_for_gpu(self) -> None:
        if self._gpu:
            torch.cuda.synchronize()


class _MPI:
    """Messages of MPI itself."""

    def __init__(self, world: World) -> None:
        from mpi4py import MPI  # here, so that to import this module starts no MPI

        self._comm, self._mpi = world.comm, MPI

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def send(self, tensor: torch.Tensor, peer: int) -> None:
        self._comm.Send([tensor.numpy(), self._mpi.BYTE], peer)

    def receive(self, tensor: torch.Tensor, peer: int) -> None:
        self._comm.Recv([tensor.numpy(), self._mpi.BYTE], peer)

    def start_send(self, tensor: torch.Tensor, peer: int) -> Any:
        return self._comm.Isend([tensor.numpy(), self._mpi.BYTE], peer)

    def start_receive(self, tensor: torch.Tensor, peer: int) -> Any:
        return self._comm.Irecv([tensor.numpy(), self._mpi.BYTE], peer)

    def finish(self, requests: list[Any]) -> None:
        self._mpi.Request.Waitall(requests)


def _nothing() -> None:
    return None


def window(nbytes: int) -> int:
    """Return how many messages of so many bytes are in flight at a time. Local."""
    return max(2, min(_WINDOW, _BYTES // nbytes))


def _row(name: str, where: str, nbytes: int, sample: Sample) -> Row:
    backend, _, kind = name.partition(" ")
    # A ping-pong is two messages; a window is many, and the answer belongs to it.
    messages = 2 if kind == "ping-pong" else window(nbytes)
    each = [seconds / messages for seconds in (sample.median, sample.low, sample.high)]
    return Row(
        what=f"{kind} {where}",
        nbytes=nbytes,
        name=backend,
        backend="" if backend == PLAIN else backend,
        algorithm="",
        median=each[0],
        low=each[1],
        high=each[2],
        n=sample.n,
        algbw=algorithm_bandwidth(nbytes, each[0]),
        busbw=None,
    )
