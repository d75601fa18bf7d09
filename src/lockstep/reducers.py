"""Where gradients live, and how they are summed there, by the name of an algorithm.

- By messages: the buffers are ordinary memory; `lockstep.allreduce` sums them.
- "shared": the ranks of one node have their buffers where all of them see them; `lockstep.windows`
  sums them in place.
- "hierarchical": on several nodes. The ranks of a node sum in place; then the buffer is cut into as
  many slices as the smallest node has ranks, and slice i is summed over the nodes by the i-th rank
  of each, so that every link of a node carries a part; then the sum is spread within the node. The
  three stages may run in three threads, one bucket behind the other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lockstep.allreduce import named, recursive_doubling, ring
from lockstep.choice import by_messages, choose
from lockstep.ending import SETTLE, within
from lockstep.errors import LockstepError
from lockstep.kernel import slice_of
from lockstep.waiting import COURIER, patience
from lockstep.world import World, current

# dtype, device and number of elements of a buffer
Kind = tuple[torch.dtype, torch.device, int]
Stage = Callable[[torch.Tensor], None]
_ON_NODE = ("shared", "hierarchical")
_COUNT = (torch.float64, torch.device("cpu"), 1)
# Up to so many bytes the number of messages counts, beyond it their length does.
_SHORT = 64 * 2**10
_opened = 0


def make(
    name: str, kinds: Sequence[Kind], world: World, group: Any, piece_bytes: int = 2**22
) -> Reducer:
    """Make buffers and the sum that goes with them. Collective over the world.

    Args:
        name: of an algorithm; "auto" takes what `lockstep.allreduce.choose` says, or messages where
            that cannot be had.
        kinds: of the buffers; the same on all ranks.
        world: all ranks.
        group: a process group of all ranks, for nothing else.
        piece_bytes: about how much is summed at a time.

    Raises:
        ValueError: there is no algorithm of that name.
        LockstepError: on all ranks, if a named algorithm cannot be had here.
    """
    chosen, backend = name, dist.get_backend(group)
    if name == "auto":
        dtype, _, count = max(kinds, key=lambda kind: kind[2], default=_COUNT)
        nbytes = min(piece_bytes, count * dtype.itemsize)
        chosen = choose(nbytes, world.size, world.nodes, dtype, backend)
    if chosen in _ON_NODE:
        try:
            return _make_on_node(chosen, kinds, world, group)
        except LockstepError:
            if name != "auto":
                raise
            chosen = by_messages(backend)  # raised on all ranks alike
    return Reducer(chosen, kinds, group)


def may_overlap() -> bool:
    """Say whether a second thread may communicate: below MPI_THREAD_MULTIPLE it must not. Local."""
    if current() is None:
        return True
    from mpi4py import MPI  # started by now; to import it earlier would start it

    return bool(MPI.Query_thread() >= MPI.THREAD_MULTIPLE)


def _make_on_node(name: str, kinds: Sequence[Kind], world: World, group: Any) -> Reducer:
    with within(_seconds_of(group) + SETTLE, "asking who shares a node"):
        everyone = world.comm.allgather((world.node, _obstacle(name, kinds, world, group)))
    if obstacles := [text for _, text in everyone if text]:
        raise LockstepError(
            f'allreduce="{name}" is not possible: {obstacles[0]}',
            needed="gradients on the CPU; for shared, all ranks on one node",
            cure='allreduce="auto" takes what is possible',
        )
    places = [node for node, _ in everyone]
    kind = _Hierarchical if world.nodes > 1 else _OnNode
    return kind(name, kinds, group, world, places)


def _obstacle(name: str, kinds: Sequence[Kind], world: World, group: Any) -> str:
    if any(device.type != "cpu" for _, device, _ in kinds):
        return "gradients on a GPU"
    if name == "shared" and world.nodes > 1:
        return f"the ranks are on {world.nodes} nodes"
    if (world.rank, world.size) != (dist.get_rank(group), dist.get_world_size(group)):
        return "the process group and the world have not the same ranks"
    if os.environ.get("LOCKSTEP_SHARED", "1") == "0":
        return f"LOCKSTEP_SHARED=0 on rank {world.rank}"
    return ""


def _seconds_of(group: Any) -> float:
    backend = group._get_backend(torch.device("cpu"))
    return backend.options._timeout.total_seconds()


class Reducer:
    """The sum by messages, and what the others have in common.

    Args:
        name: of the algorithm.
        kinds: of the buffers.
        group: all ranks.

    Attributes:
        name: of the algorithm.
        buffers: flat, zeros.
        stages: to sum a piece of a buffer is to call them in this order, in the same order of
            pieces on all ranks; each may have a thread of its own. Collective.
    """

    def __init__(self, name: str, kinds: Sequence[Kind], group: Any) -> None:
        self.name, self._group = name, group
        self.buffers = self._make_buffers(kinds)
        self.stages: list[Stage] = []
        self._add_stages()

    def sum(self, piece: torch.Tensor) -> None:
        """Replace a piece of a buffer by its sum over all ranks. Collective.

        Args:
            piece: a slice of one of the buffers; the same on all ranks.

        Raises:
            CollectiveTimeout: a rank did not come.
        """
        for stage in self.stages:
            stage(piece)

    def count(self, mine: int) -> int:
        """Return the sum of whole numbers over all ranks, when no sum is under way. Collective."""
        # float64 counts exactly up to 2^53
        on = self.buffers[0].device if self.buffers else torch.device("cpu")
        number = torch.tensor([float(mine)], dtype=torch.float64, device=on)
        dist.all_reduce(number, group=self._group)
        return int(number.item())

    def be_eager(self, eager: bool) -> None:
        """Say whether somebody waits for the sums, also for those under way. Local."""

    def close(self) -> None:
        """End what is under way; buffers stay as long as they are used. Collective."""

    def _make_buffers(self, kinds: Sequence[Kind]) -> list[torch.Tensor]:
        return [torch.zeros(count, dtype=dtype, device=device) for dtype, device, count in kinds]

    def _add_stages(self) -> None:
        function = named(self.name)
        self.stages.append(lambda piece: function(piece, self._group))


class _OnNode(Reducer):
    """Where all ranks are on one node: buffers that all of them see.

    Attributes:
        memory: that of the node.
    """

    def __init__(
        self, name: str, kinds: Sequence[Kind], group: Any, world: World, places: Sequence[int]
    ) -> None:
        self._world, self._places = world, places
        super().__init__(name, kinds, group)

    def count(self, mine: int) -> int:
        """Return the sum of whole numbers over all ranks, when no sum is under way. Collective."""
        self._number.fill_(mine)
        self.sum(self._number)
        return int(self._number.item())

    def be_eager(self, eager: bool) -> None:
        """Say whether somebody waits for the sums, also for those under way. Local."""
        self.memory.be_eager(eager)

    def close(self) -> None:
        """End what is under way; buffers stay as long as they are used. Collective."""
        self.memory.close()

    def _make_buffers(self, kinds: Sequence[Kind]) -> list[torch.Tensor]:
        from lockstep.mpi_backend.open import open_communicator  # here: `--help` starts no MPI
        from lockstep.windows import Windows

        global _opened
        _opened += 1
        world, seconds = self._world, _seconds_of(self._group)
        ranks = [rank for rank, node in enumerate(self._places) if node == world.node]
        comm = open_communicator(world.comm, ranks, f"{self.name}:{_opened}", seconds)
        flats = [(dtype, count) for dtype, _, count in (*kinds, _COUNT)]
        names = [f"rank {rank}" for rank in ranks]
        with within(seconds + SETTLE, "making shared buffers for gradients"):
            self.memory = Windows(
                comm, flats, purpose="gradients", names=names, seconds=seconds, meetings=2
            )
        *buffers, self._number = self.memory.buffers
        return buffers

    def _add_stages(self) -> None:
        self.stages.append(self.memory.sum)


class _Hierarchical(_OnNode):
    """The sum within nodes, across them, and back."""

    def _add_stages(self) -> None:
        nodes = [
            [rank for rank, place in enumerate(self._places) if place == node]
            for node in range(self._world.nodes)
        ]
        self._slices = min(len(ranks) for ranks in nodes)
        self._across: Any = None
        self._scratch: dict[torch.dtype, torch.Tensor] = {}
        limit = timedelta(seconds=_seconds_of(self._group))
        for number in range(self._slices):
            made = dist.new_group([ranks[number] for ranks in nodes], timeout=limit)
            if number == self._world.local_rank:
                self._across = made
        self.stages += [
            lambda piece: self.memory.sum(piece, everywhere=False),
            self._exchange,
            lambda piece: self.memory.spread(piece, meeting=1),
        ]

    def close(self) -> None:
        """End what is under way; buffers stay as long as they are used. Collective."""
        if self.memory.close() and self._across is not None:
            dist.destroy_process_group(self._across)

    def _exchange(self, piece: torch.Tensor) -> None:
        """Sum this rank's slice over the nodes, where the first rank of the node has it."""
        if self._across is None:
            return  # a node with more ranks than another
        first = self.memory.windows(piece)[0]
        begin, end = slice_of(
            self._world.local_rank, self._slices, len(piece), piece.element_size()
        )
        mine = first[begin:end]
        # Not more eager: measured, ranks that spin for the network slow each other down.
        with patience(COURIER):
            self._sum_across(mine)

    def _sum_across(self, mine: torch.Tensor) -> None:
        if mine.nbytes <= _SHORT:
            recursive_doubling(mine, self._across)
            return
        scratch, part = self._scratch.get(mine.dtype), -(-len(mine) // self._world.nodes)
        if scratch is None or len(scratch) < part:
            # Kept: to allocate it each time leaves holes of its size in the heap.
            self._scratch[mine.dtype] = scratch = torch.empty(part, dtype=mine.dtype)
        ring(mine, self._across, scratch)
