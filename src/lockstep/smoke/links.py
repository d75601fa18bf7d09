"""Latency and bandwidth between pairs of ranks, by ping-pong over MPI, several pairs at a time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI

from lockstep.errors import CollectiveTimeout
from lockstep.waiting import wait_until
from lockstep.world import World

# Tag of the ping-pong on the checks' own communicator.
_TAG = 7
# Short trips: so many to warm up, so many that count, for at most so long.
_WARM, _TRIPS, _SHORT = 10, 40, 0.3
# Long messages grow fourfold until a trip takes so long, or up to so many bytes.
_FIRST, _LARGEST, _LONG = 2**16, 2**22, 0.05
# Rounds at the most: of many nodes, each meets only so many others.
ROUNDS = 15
# A trip of the longest message over a link of 1 MB/s takes 8 s.
_PATIENCE = 12.0
_GO_ON, _STOP = 1, 0


@dataclass(frozen=True)
class Link:
    """Half of the shortest round trip, in seconds, and bytes a second of the longest message."""

    a: int
    b: int
    latency: float
    bandwidth: float


def schedule(points: Sequence[int], rounds: int = ROUNDS) -> list[list[tuple[int, int]]]:
    """Return rounds of disjoint pairs; enough rounds pair everybody with everybody. Local.

    Source: the circle method for tournaments (E. Lucas, 1883): one stays, the others move on.

    Args:
        points: what is to be paired.
        rounds: how many at the most.
    """
    ring: list[int | None] = list(points)
    if len(ring) % 2:
        ring.append(None)
    found = []
    for _ in range(min(rounds, len(ring) - 1)):
        half = len(ring) // 2
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        found.append([(a, b) for a, b in pairs if a is not None and b is not None])
        ring[1:] = [ring[-1], *ring[1:-1]]
    return found


def measure(world: World, points: Sequence[int]) -> list[Link]:
    """Play all rounds. Collective over the points; other ranks return at once.

    Args:
        world: whose communicator carries the messages.
        points: ranks, the same on all.

    Returns:
        the links that this rank has measured: those to points after it in a pair.

    Raises:
        CollectiveTimeout: a peer did not answer; it is named.
    """
    found: list[Link] = []
    if world.rank not in points:
        return found
    for pairs in schedule(points):
        for a, b in pairs:
            if world.rank == a:
                found.append(_drive(world.comm, a, b))
            elif world.rank == b:
                _echo(world.comm, a)
    return found


def _drive(comm: MPI.Intracomm, a: int, b: int) -> Link:
    """Send messages there and back, and time them; the first byte says whether more follow."""
    buffer = np.full(_LARGEST, _GO_ON, dtype=np.uint8)
    times, end = [], time.monotonic() + _SHORT
    for trip in range(_WARM + _TRIPS):
        seconds = _trip(comm, buffer[:1], b)
        if trip >= _WARM:
            times.append(seconds)
        if trip > _WARM and time.monotonic() > end:
            break
    size = _FIRST
    _trip(comm, buffer[:size], b)
    while (seconds := min(_trip(comm, buffer[:size], b) for _ in range(2))) < _LONG:
        if size >= _LARGEST:
            break
        size *= 4
    buffer[0] = _STOP
    _wait(comm.Isend(buffer[:1], b, _TAG), b)
    return Link(a, b, min(times) / 2, size / (seconds / 2))


def _echo(comm: MPI.Intracomm, peer: int) -> None:
    buffer, status = np.empty(_LARGEST, dtype=np.uint8), MPI.Status()
    while True:
        _wait(comm.Irecv(buffer, peer, _TAG), peer, status)
        if buffer[0] == _STOP:
            return
        count = status.Get_count(MPI.BYTE)
        _wait(comm.Isend(buffer[:count], peer, _TAG), peer)


def _trip(comm: MPI.Intracomm, message: np.ndarray, peer: int) -> float:
    start = time.perf_counter()
    _wait(comm.Isend(message, peer, _TAG), peer)
    _wait(comm.Irecv(message, peer, _TAG), peer)
    return time.perf_counter() - start


def _wait(request: MPI.Request, peer: int, status: MPI.Status | None = None) -> None:
    if not wait_until(lambda: request.Test(status), _PATIENCE):
        raise CollectiveTimeout(
            f"no answer from rank {peer} within {_PATIENCE:g} s while the links were measured",
            needed="hosts that reach each other over the network that MPI uses",
            cure=f"look at the host of rank {peer}: is it up, is its network?",
        )
