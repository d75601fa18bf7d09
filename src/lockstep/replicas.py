"""Keep the copies of a model on all ranks equal, and measure whether they are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lockstep.errors import LockstepError
from lockstep.world import World


def own_group() -> Any:
    """Open a group of all ranks with the default group's timeout; torch gives 30 minutes to it."""
    default: Any = dist.group.WORLD
    backend = default._get_backend(default._device_types[0])
    return dist.new_group(timeout=backend.options._timeout)


def equalize(
    model: nn.Module,
    group: Any = None,
    settings: str = "",
    trained: Iterable[torch.Tensor] | None = None,
) -> None:
    """Give all ranks the root's parameters and buffers, if the model is the same. Collective.

    Args:
        model: the model.
        group: the ranks.
        settings: what else has to be the same, in words.
        trained: parameters whose order has to be the same, too.

    Raises:
        LockstepError: on all ranks, naming the first rank and tensor that differ.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    mine = [f"{name}: {t.dtype}{list(t.shape)}{_frozen(t)}" for name, t in tensors]
    names = {id(t): name for name, t in tensors}
    order = [f"{names.get(id(t), 'unnamed')}: {list(t.shape)}" for t in trained or ()]
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (mine, order, [settings]), group=group)
    _require_same("model", [theirs[0] for theirs in everyone])
    _require_same("list of parameters", [theirs[1] for theirs in everyone])
    _require_same("setting", [theirs[2] for theirs in everyone])
    share([t for _, t in tensors], group)


def _frozen(tensor: torch.Tensor) -> str:
    trains = not isinstance(tensor, nn.Parameter) or tensor.requires_grad
    return "" if trains else " that needs no gradient"


def _require_same(what: str, everyone: list[list[str]]) -> None:
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            pairs = zip(_padded(everyone[0], theirs), _padded(theirs, everyone[0]), strict=True)
            root, other = next((a, b) for a, b in pairs if a != b)
            raise LockstepError(
                f"the {what} on rank {rank} is not that of rank 0: {other} against {root}",
                needed="the same parameters, buffers and settings, in the same order, on all ranks",
                cure="make the model from the same settings on all ranks",
            )


def share(tensors: Iterable[torch.Tensor], group: Any = None) -> None:
    """Copy the root's tensors to all ranks. Collective."""
    with torch.no_grad():
        for tensor in tensors:
            dist.broadcast(tensor, group=group, group_src=0)


def divergence(model: nn.Module, world: World) -> float:
    """Return the largest difference of any parameter or buffer between two ranks. Collective.

    Exactly 0.0 if all ranks hold the same numbers; infinite if one has a NaN where another has not.
    """
    tensors = [t.detach().reshape(-1) for t in (*model.parameters(), *model.buffers())]
    if not tensors:
        return 0.0
    values = torch.cat([t.to("cpu", torch.float64) for t in tensors])
    broken = ~values.isfinite()
    # What is not finite is compared as such: differences of infinities would be NaN.
    kinds = torch.where(broken, values.nan_to_num(1.0, 2.0, 3.0), 0.0)
    values = torch.cat([values.masked_fill(broken, 0.0), kinds])
    highest, lowest = values.clone(), values.clone()
    device = tensors[0].device if dist.get_backend() == "nccl" else torch.device("cpu")
    highest, lowest = highest.to(device), lowest.to(device)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
    difference = (highest - lowest).cpu()
    if difference[len(difference) // 2 :].any():
        return float("inf")
    return float(difference.max())


def clip(buffers: list[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Scale gradients so that their norm over all buffers is at most max_norm. Local.

    The same on all ranks, as the buffers are. A norm that is not finite scales to NaN, as torch's
    clip_grad_norm_ does, so that it is seen.

    Returns:
        the norm before, a scalar tensor.
    """
    norms = torch.stack([torch.linalg.vector_norm(buffer).to(torch.float64) for buffer in buffers])
    norm = torch.linalg.vector_norm(norms)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for buffer in buffers:
        buffer.mul_(factor.to(buffer.dtype))
    return norm


def _padded(these: list[str], others: list[str]) -> list[str]:
    return these + ["nothing"] * (len(others) - len(these))
