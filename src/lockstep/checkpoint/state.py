"""What a checkpoint may hold, copied away from the training; and put back where it fits. Local."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import nn

from lockstep.errors import CheckpointError

_SIMPLE = (str, int, float, complex, bool, bytes, type(None), torch.dtype)
# What a schedule adds to the groups of its optimizer.
_OF_SCHEDULES = {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"}


def copied(value: Any, name: str = "state") -> Any:
    """Return a copy that training cannot change any more: tensors on the CPU, plain containers.

    Args:
        value: tensors, numbers, texts, None, and lists, tuples, dicts of them; a path becomes text.
        name: of the value, for the error.

    Raises:
        CheckpointError: there is something else in it, which only a pickle could hold.
    """
    if isinstance(value, torch.Tensor):
        kept = value.detach()
        return kept.clone() if kept.device.type == "cpu" else kept.cpu()
    if isinstance(value, Mapping):
        return {
            copied(key, f"a key of {name}"): copied(one, f"{name}.{key}")
            for key, one in value.items()
        }
    if isinstance(value, list | tuple):
        kind = list if isinstance(value, list) else tuple
        return kind(copied(one, f"{name}[{i}]") for i, one in enumerate(value))
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, PurePath):
        return str(value)
    if type(value) in _SIMPLE:
        return value
    raise CheckpointError(
        f"{name} is of type {type(value).__name__}",
        needed="tensors, numbers, texts, and lists, tuples and dicts of them: what can be read "
        "back without running code from the file",
        cure=f"turn {name} into one of these before it is saved",
    )


def load_model(model: nn.Module, saved: Mapping[str, torch.Tensor]) -> None:
    """Give a model its saved parameters and buffers; nothing is changed unless all fit.

    Args:
        model: without a wrapper of DistributedDataParallel.
        saved: of its state_dict().

    Raises:
        CheckpointError: it is another model; names the first parameter or buffer that differs.
    """
    own = model.state_dict()
    for name in dict.fromkeys([*own, *saved]):
        mine, other = own.get(name), saved.get(name)
        if _spell(mine) == _spell(other):
            continue
        raise CheckpointError(
            f"the checkpoint is of another model: {name} is {_spell(other)} in the checkpoint, "
            f"{_spell(mine)} in this model",
            needed="the model that the checkpoint was written with",
            cure="give the same flags as then, such as --width, or another run directory, or "
            "--resume none",
        )
    model.load_state_dict(dict(saved))


def load_optimizer(optimizer: Any, saved: Mapping[str, Any]) -> None:
    """Give an optimizer its saved state.

    Args:
        optimizer: with param_groups, state_dict and load_state_dict, as in torch.optim.
        saved: of its state_dict().

    Raises:
        CheckpointError: it is another optimizer, or one of another model.
    """
    own, theirs = optimizer.state_dict()["param_groups"], saved["param_groups"]
    if _spell_groups(own) != _spell_groups(theirs):
        raise CheckpointError(
            "the checkpoint is of another optimizer: it has "
            f"{_spell_groups(theirs)}; this one has {_spell_groups(own)}",
            needed="the optimizer that the checkpoint was written with",
            cure="give the same flags as then, such as --optimizer, or --resume none",
        )
    optimizer.load_state_dict(dict(saved))


def _spell_groups(groups: list[dict[str, Any]]) -> str:
    return "; ".join(
        f"{len(group['params'])} parameters with {', '.join(_flags(group))}" for group in groups
    )


def _flags(group: dict[str, Any]) -> list[str]:
    # AdamW is an Adam with this flag set; it is the one value that makes another optimizer
    other = ["decoupled"] if group.get("decoupled_weight_decay") else []
    return sorted({str(key) for key in group} - _OF_SCHEDULES - {"params"}) + other


def _spell(tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return "missing"
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
