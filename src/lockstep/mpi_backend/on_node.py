"""What the verbs do where all ranks of a group share a node: see `NodeTeam`.

Each function here returns how to carry out one call. That it goes this way must be the same on all
ranks, so it never depends on how a rank's own tensors lie in memory: those that are not plain are
copied, and when the verb runs, not before, since a verb queued before it may still change them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from lockstep.mpi_backend.buffers import flat, give_back, is_plain
from lockstep.mpi_backend.datatypes import Reduction
from lockstep.mpi_backend.team import NodeTeam

# Takes the signature, the seconds and whether to wait eagerly; says whether the calls were the same
# on all ranks. If they were not, nothing has been changed.
OnNode = Callable[[NodeTeam, int, float, bool], bool]
_Tensors = Sequence[torch.Tensor]


def total(tensor: torch.Tensor, how: Reduction) -> OnNode:
    """Replace a tensor by its sum, or its mean, over all ranks."""
    if is_plain(tensor) and how.after is None:  # the most frequent call, kept short
        return lambda team, number, seconds, eager: team.all_reduce(number, seconds, eager, tensor)

    def run(team: NodeTeam, number: int, seconds: float, eager: bool) -> bool:
        work = flat(tensor)
        if not team.all_reduce(number, seconds, eager, work):
            return False
        if how.after is not None:
            how.after(work, team.size)
        give_back(work, tensor)
        return True

    return run


def copied(tensor: torch.Tensor, root: int, rank: int) -> OnNode:
    """Copy the root's tensor to all ranks."""

    def run(team: NodeTeam, number: int, seconds: float, eager: bool) -> bool:
        work = flat(tensor)
        if not team.broadcast(number, seconds, eager, work, root):
            return False
        if rank != root:
            give_back(work, tensor)
        return True

    return run


def gathered(outputs: _Tensors, mine: torch.Tensor, rank: int) -> OnNode:
    """Copy the tensor of rank r to outputs[r] on every rank."""

    def run(team: NodeTeam, number: int, seconds: float, eager: bool) -> bool:
        sent = flat(mine)
        targets = [out.detach() if is_plain(out) else torch.empty_like(sent) for out in outputs]
        own = targets[rank].data_ptr() == sent.data_ptr()
        if any(_overlap(sent, out) for r, out in enumerate(targets) if not (own and r == rank)):
            sent = sent.clone()
        addresses = [out.data_ptr() for out in targets]
        if not team.all_gather(number, seconds, eager, sent, addresses):
            return False
        for staged, output in zip(targets, outputs, strict=True):
            give_back(staged, output)
        return True

    return run


def gathered_in_one(output: torch.Tensor, mine: torch.Tensor, rank: int) -> OnNode:
    """Gather the tensors of all ranks, in order, in one tensor on every rank."""

    def run(team: NodeTeam, number: int, seconds: float, eager: bool) -> bool:
        whole = flat(output)
        rows = list(whole.view(team.size, -1)) if output.numel() else [whole] * team.size
        if not gathered(rows, mine, rank)(team, number, seconds, eager):
            return False
        give_back(whole, output)
        return True

    return run


def part_of_total(output: torch.Tensor, inputs: _Tensors, how: Reduction, rank: int) -> OnNode:
    """Leave in output the sum, or the mean, over all ranks of their inputs[r], on rank r.

    Args:
        inputs: one tensor a rank, or a single one that holds all of them in order.
    """

    def run(team: NodeTeam, number: int, seconds: float, eager: bool) -> bool:
        single = len(inputs) == 1 and inputs[0].numel() == output.numel() * team.size
        whole = flat(inputs[0]) if single else torch.cat([flat(t).view(-1) for t in inputs])
        result = output.detach() if is_plain(output) else torch.empty_like(flat(output))
        own = whole.data_ptr() + rank * result.nbytes
        if _overlap(whole, result) and result.data_ptr() != own:
            whole = whole.clone()
        if not team.reduce_scatter(number, seconds, eager, whole, result):
            return False
        if how.after is not None:
            how.after(result, team.size)
        give_back(result, output)
        return True

    return run


def in_turn(steps: Sequence[OnNode | None]) -> OnNode | None:
    """Carry out several; None if one of them cannot be."""
    all_ = [step for step in steps if step is not None]
    if len(all_) != len(steps) or not all_:
        return None

    def run(team: NodeTeam, number: int, seconds: float, eager: bool) -> bool:
        # What is the same for the first is the same for all: the signature covers all of them.
        return all(step(team, number, seconds, eager) for step in all_)

    return run


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes
