"""The sum of a flat buffer over all ranks, in place, written out message by message.

Each function is one algorithm and reads as it: the messages are isend and irecv of
torch.distributed, so that it runs over mpi, gloo and nccl alike. n is the number of ranks, m the
number of bytes of the buffer. Every function is Collective; it takes

- flat: a contiguous tensor of one dimension; float32, float64, bfloat16 or float16; any length,
  shorter than the number of ranks too; the same on all ranks;
- group: the process group; by default all ranks,

and leaves the same bits on every rank. Where an exception has left one midway, the group takes none
any more: GroupBroken. In float32 the result differs from that of another algorithm
in the last bits, since the order of the additions differs; the half types are added as such.

The algorithms and their names: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective
communication operations in MPICH", 2005; the ring: P. Patarasuk, X. Yuan, "Bandwidth optimal
all-reduce algorithms for clusters of workstations", 2009.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from lockstep.choice import by_messages, choose
from lockstep.midway import whole
from lockstep.world import current

Algorithm = Callable[..., None]
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def allreduce(flat: torch.Tensor, algorithm: str = "auto", group: Any = None) -> None:
    """Replace flat by its sum over all ranks. Collective.

    Args:
        flat: see above.
        algorithm: "gather_broadcast", "ring", "recursive_doubling", "rabenseifner", "mpi", or
            "auto", which takes the backend's own, over gloo the ring, if no table says otherwise.
        group: see above.

    Raises:
        ValueError: naming what is wrong with the buffer or the name of the algorithm.
    """
    check(flat)
    named(algorithm)(flat, group)


def named(algorithm: str) -> Algorithm:
    """Return the function of an algorithm. Local.

    Raises:
        ValueError: there is none of that name.
    """
    known = ALGORITHMS | {"auto": _auto}
    if algorithm not in known:
        raise ValueError(
            f"found the all-reduce {algorithm!r}\n  needed: one of {', '.join(known)}; for an "
            "optimizer also shared, hierarchical\n"
            "  to do:  choose one of them"
        )
    return known[algorithm]


def check(flat: torch.Tensor) -> None:
    """Refuse a buffer that the algorithms cannot take, by name. Local."""
    if flat.dim() != 1 or not flat.is_contiguous() or flat.dtype not in _DTYPES:
        raise ValueError(
            f"found a buffer {flat.dtype}{list(flat.shape)}, "
            f"{'' if flat.is_contiguous() else 'not '}contiguous\n"
            "  needed: a contiguous tensor of one dimension, of float32, float64, bfloat16 or "
            "float16\n  to do:  flatten it, such as tensor.reshape(-1).contiguous()"
        )


@whole
def gather_broadcast(flat: torch.Tensor, group: Any = None) -> None:
    """Let the root add up the buffers of all ranks, and send the sum to all: the naive one.

    2(n-1) steps at the root, which receives and sends (n-1)m bytes; every other rank sends m.
    """
    rank, size = _place(group)
    if rank != 0:
        _send(flat, 0, group)
        _receive(flat, 0, group)
        return
    other = torch.empty_like(flat)
    for source in range(1, size):
        _receive(other, source, group)
        flat += other
    for target in range(1, size):
        _send(flat, target, group)


@whole
def ring(flat: torch.Tensor, group: Any = None, scratch: torch.Tensor | None = None) -> None:
    """Send parts round a ring: first each is summed on its way, then the sums go round.

    2(n-1) steps; every rank sends 2(n-1)/n m bytes, which is the least possible. The buffer is
    cut into n parts. In the first round each rank adds its own numbers to the part that comes from
    the left and passes it on; after n-1 steps rank r holds the sum of part r+1. In the second
    round the sums go round in the same way.

    Args:
        scratch: of the same dtype, at least one part long; by default it is made for the call.
    """
    rank, size = _place(group)
    parts = _parts(flat, size)
    left, right = (rank - 1) % size, (rank + 1) % size
    arriving = torch.empty_like(parts[0]) if scratch is None else scratch
    for step in range(size - 1):
        leaving, mine = parts[(rank - step) % size], parts[(rank - step - 1) % size]
        came = arriving[: len(mine)]
        _exchange(leaving, right, came, left, group)
        mine += came
    for step in range(size - 1):
        leaving, mine = parts[(rank + 1 - step) % size], parts[(rank - step) % size]
        _exchange(leaving, right, mine, left, group)


@whole
def recursive_doubling(flat: torch.Tensor, group: Any = None) -> None:
    """Exchange the whole buffer with partners at distance 1, 2, 4, …: few steps, for short buffers.

    log2(p) steps among p ranks, p the largest power of two not above n, and two more if n is no
    power of two; every rank sends log2(p) m bytes. Both partners of a step add the same two
    numbers, so that all ranks get the same bits.
    """
    active, partner = _fold(flat, group)
    if active is not None:
        other = torch.empty_like(flat)
        distance = 1
        while distance < active.count:
            peer = active.rank_of(active.index ^ distance)
            _exchange(flat, peer, other, peer, group)
            flat += other
            distance *= 2
    _unfold(flat, partner, group)


@whole
def rabenseifner(flat: torch.Tensor, group: Any = None) -> None:
    """Halve the buffer and the distance: sum by halves, then gather the halves again.

    2 log2(p) steps among p ranks (see recursive_doubling); every rank sends 2(p-1)/p m bytes: as
    few as the ring, in fewer steps. R. Rabenseifner, "Optimization of collective reduction
    operations", 2004.
    """
    active, partner = _fold(flat, group)
    if active is not None:
        other = torch.empty_like(flat)
        low, high = 0, len(flat)
        halvings: list[tuple[int, int, int]] = []
        distance = active.count // 2
        while distance:
            peer, middle = active.rank_of(active.index ^ distance), (low + high) // 2
            kept, given = (low, middle), (middle, high)
            if active.index & distance:
                kept, given = given, kept
            came = other[kept[0] : kept[1]]
            _exchange(flat[given[0] : given[1]], peer, came, peer, group)
            flat[kept[0] : kept[1]] += came
            halvings.append((peer, *given))
            low, high = kept
            distance //= 2
        for peer, start, end in reversed(halvings):
            _exchange(flat[low:high], peer, flat[start:end], peer, group)
            low, high = min(low, start), max(high, end)
    _unfold(flat, partner, group)


def mpi(flat: torch.Tensor, group: Any = None) -> None:
    """Call the all-reduce of the group's backend; over mpi that is MPI's own MPI_Allreduce.

    Steps and bytes are the library's choice.
    """
    dist.all_reduce(flat, group=group)


ALGORITHMS: dict[str, Algorithm] = {
    "gather_broadcast": gather_broadcast,
    "ring": ring,
    "recursive_doubling": recursive_doubling,
    "rabenseifner": rabenseifner,
    "mpi": mpi,
}


# What works on buffers of its own only: see `lockstep.reducers`.
NAMES = (*ALGORITHMS, "shared", "hierarchical")


def _auto(flat: torch.Tensor, group: Any = None) -> None:
    backend, world = dist.get_backend(group), current()
    nodes = world.nodes if world is not None else 1
    name = choose(flat.nbytes, dist.get_world_size(group), nodes, flat.dtype, backend)
    ALGORITHMS.get(name, ALGORITHMS[by_messages(backend)])(flat, group)


class _Active:
    """The p ranks, p a power of two, that exchange among themselves while the others wait.

    Of the first 2(n-p) ranks the odd ones take part, for themselves and the even one below; then
    all the rest.

    Attributes:
        index: number of this rank among the active ones.
        count: p.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.count = 1 << (size.bit_length() - 1)
        self.extra = size - self.count
        self.index = rank // 2 if rank < 2 * self.extra else rank - self.extra

    def rank_of(self, index: int) -> int:
        """Return the rank of an active one."""
        return 2 * index + 1 if index < self.extra else index + self.extra


def _fold(flat: torch.Tensor, group: Any) -> tuple[_Active | None, int | None]:
    """Bring the sum to a number of ranks that is a power of two.

    Returns:
        the active ranks, None on a rank that is not one; and the rank this one is paired with.
    """
    rank, size = _place(group)
    active = _Active(rank, size)
    if rank >= 2 * active.extra:
        return active, None
    if rank % 2 == 0:
        _send(flat, rank + 1, group)
        return None, rank + 1
    other = torch.empty_like(flat)
    _receive(other, rank - 1, group)
    flat += other
    return active, rank - 1


def _unfold(flat: torch.Tensor, partner: int | None, group: Any) -> None:
    """Give the result to the ranks that waited."""
    rank, _ = _place(group)
    if partner is None:
        return
    if rank % 2 == 0:
        _receive(flat, partner, group)
    else:
        _send(flat, partner, group)


def _place(group: Any) -> tuple[int, int]:
    return dist.get_rank(group), dist.get_world_size(group)


def _parts(flat: torch.Tensor, size: int) -> list[torch.Tensor]:
    """Cut a buffer into one part a rank; the first ones are longer by one, some may be empty."""
    each, longer = divmod(len(flat), size)
    return list(flat.split([each + (i < longer) for i in range(size)]))


def _send(tensor: torch.Tensor, peer: int, group: Any) -> None:
    if len(tensor):
        dist.send(tensor, group=group, group_dst=peer)


def _receive(tensor: torch.Tensor, peer: int, group: Any) -> None:
    if len(tensor):
        dist.recv(tensor, group=group, group_src=peer)


def _exchange(
    leaving: torch.Tensor, target: int, arriving: torch.Tensor, source: int, group: Any
) -> None:
    """Send and receive at the same time, neither waiting for the other; nothing if it is empty."""
    operations = []
    if len(arriving):
        operations.append(dist.P2POp(dist.irecv, arriving, group=group, group_peer=source))
    if len(leaving):
        operations.append(dist.P2POp(dist.isend, leaving, group=group, group_peer=target))
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
