"""The model alone, as a safetensors file that others can read."""

from __future__ import annotations

import os
from pathlib import Path

from torch import nn

from lockstep import files
from lockstep.errors import StorageError
from lockstep.together import LIMIT, on_root
from lockstep.world import World

# One entry only: with two the library writes them in an order of chance, and the same weights would
# make different files.
_OURS = {"written_by": "lockstep"}


def export(
    model: nn.Module, path: Path, world: World | None = None, timeout: float = LIMIT
) -> None:
    """Write the parameters and buffers of a model, by their names in its state_dict().

    Args:
        model: without a wrapper of DistributedDataParallel.
        path: of the file; one that an earlier export has left is replaced, no other.
        world: with it the call is Collective, the root writes, and a failure is raised on all
            ranks; without it Local.
        timeout: seconds to wait for the other ranks, and for the disk.

    Raises:
        StorageError: it cannot be written, or another file has that name.
    """
    if world is None:
        _export(model, path)
    else:
        on_root(world, lambda: _export(model, path), "export the model", timeout)


def check_export(path: Path) -> None:
    """Refuse, before hours of training, a name that `export` could not take. Local.

    Raises:
        StorageError: another file has that name, or its directory is missing or not writable.
    """
    if path.exists() and not _is_ours(path):
        raise StorageError(
            f"{path} is there already, and no export of Lockstep",
            needed="a new name for the exported model",
            cure="move that file away, or change --export",
        )
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise StorageError(
            f"{path.parent} is missing, or cannot be written to",
            needed="a directory for the exported model",
            cure="`mkdir -p` makes it; or change --export",
        )


def _export(model: nn.Module, path: Path) -> None:
    from safetensors.torch import save

    check_export(path)
    # each tensor with memory of its own, in plain order: the format knows neither views nor strides
    tensors = {
        name: tensor.detach().cpu().contiguous().clone()
        for name, tensor in model.state_dict().items()
    }
    try:
        with files.fresh(path) as file:
            file.write(save(tensors, metadata=_OURS))
    except OSError as error:
        raise files.failure(error, "export the model to", path) from error


def _is_ours(path: Path) -> bool:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        return False  # not even opened: a pipe would wait for a writer
    try:
        with safe_open(path, framework="pt") as file:
            return (file.metadata() or {}).items() >= _OURS.items()
    except (OSError, SafetensorError):
        return False
