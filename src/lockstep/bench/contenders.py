"""Those who take part in the comparison of all-reduces, each with a buffer of its own place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lockstep import reducers
from lockstep.allreduce import NAMES
from lockstep.errors import SettingsError
from lockstep.rendezvous import choose_interface
from lockstep.rendezvous.env import variables
from lockstep.world import World

LIMIT = "memcpy"
PLAIN = "MPI_Allreduce"
# What the SGD written by hand does, in the buffers of its gradients.
CHOSEN = "mpi: auto"
# They sum through memory, not through the group's backend alone: once is enough.
_IN_PLACE = {"shared", "hierarchical"}
# Those that every MPI can add.
_PLAIN_DTYPES = {torch.float32, torch.float64}


@dataclass(frozen=True)
class Prepared:
    """A contender at one size.

    Attributes:
        buffer: what is summed; float, one dimension, on the CPU or a GPU.
        call: sums it, in place, and returns when it is done. Collective.
        close: gives back what was made for it. Collective.
    """

    buffer: torch.Tensor
    call: Callable[[], object]
    close: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Contender:
    """A way to sum a buffer over all ranks.

    Attributes:
        name: in tables.
        backend: of torch.distributed; nothing where none is used.
        algorithm: of `lockstep.allreduce`; nothing where none is used.
        prepare: takes a tensor of the CPU, which it may use as its buffer. Collective.
        sums: False for what only copies.
    """

    name: str
    backend: str
    algorithm: str
    prepare: Callable[[torch.Tensor], Prepared]
    sums: bool = True


def open_groups(world: World) -> dict[str, Any]:
    """Open a group of all ranks over each backend that can work here. Collective.

    Returns:
        backend and group; that of mpi is the default group.
    """
    groups: dict[str, Any] = {"mpi": dist.group.WORLD}
    if dist.is_gloo_available():
        with variables(choose_interface(world)):
            groups["gloo"] = dist.new_group(backend="gloo")
    # nccl wants a GPU for each rank of a node.
    enough = torch.cuda.is_available() and torch.cuda.device_count() >= world.local_size
    if all(world.comm.allgather(enough and dist.is_nccl_available())):
        torch.cuda.set_device(world.local_rank)
        groups["nccl"] = dist.new_group(backend="nccl")
    return groups


def contenders(
    world: World, groups: dict[str, Any], dtype: torch.dtype, only: str | None = None
) -> list[Contender]:
    """Return those that can sum a dtype, the limit first. Local.

    Args:
        world: the ranks.
        groups: from `open_groups`.
        dtype: of the buffers.
        only: parts of names, by commas: those alone, and the limit; None for all.

    Raises:
        SettingsError: a part is in no name.
    """
    found = [Contender(LIMIT, "", "", _copy, sums=False)]
    if dtype in _PLAIN_DTYPES:
        found.append(Contender(PLAIN, "", "", lambda tensor: _plain(world, tensor)))
    for backend, group in groups.items():
        # One of the two that sum in place is for one node, the other for several.
        other = "hierarchical" if world.nodes == 1 else "shared"
        algorithms = [a for a in NAMES if a != other and (backend == "mpi" or a not in _IN_PLACE)]
        algorithms += ["auto"] if backend == "mpi" else []
        found += [_torch(world, backend, group, algorithm) for algorithm in algorithms]
    wanted = [part.strip() for part in only.split(",")] if only else [""]
    for part in wanted:
        if not any(part in one.name for one in found):
            raise SettingsError(
                f"found --only {part}, which nothing that is measured here has in its name",
                needed=f"a part of one of: {', '.join(one.name for one in found)}",
                cure="change --only",
            )
    return [one for one in found if any(part in one.name for part in (LIMIT, *wanted))]


def _torch(world: World, backend: str, group: Any, algorithm: str) -> Contender:
    on_gpu = backend == "nccl"

    def prepare(tensor: torch.Tensor) -> Prepared:
        if algorithm == "mpi":
            # What every script of torch calls, on a tensor of its own.
            buffer = tensor.cuda() if on_gpu else tensor
            return Prepared(
                buffer, _complete(partial(dist.all_reduce, buffer, group=group), on_gpu)
            )
        device = torch.device("cuda", world.local_rank) if on_gpu else tensor.device
        kind = (tensor.dtype, device, tensor.numel())
        reducer = reducers.make(algorithm, [kind], world, group, tensor.nbytes)
        buffer = reducer.buffers[0]
        reducer.be_eager(True)
        return Prepared(buffer, _complete(partial(reducer.sum, buffer), on_gpu), reducer.close)

    # That of this name is the backend's own.
    shown = "all_reduce" if algorithm == "mpi" else algorithm
    return Contender(f"{backend}: {shown}", backend, algorithm, prepare)


def _complete(call: Callable[[], object], on_gpu: bool) -> Callable[[], object]:
    """Let a call wait for the GPU, which else goes on when the call has returned."""
    if not on_gpu:
        return call

    def both() -> None:
        call()
        torch.cuda.synchronize()

    return both


def _copy(tensor: torch.Tensor) -> Prepared:
    source, target = tensor.view(torch.uint8).numpy(), np.zeros(tensor.nbytes, np.uint8)
    return Prepared(tensor, lambda: np.copyto(target, source))


def _plain(world: World, tensor: torch.Tensor) -> Prepared:
    from mpi4py import MPI  # here, so that to import this module starts no MPI

    kind = MPI.FLOAT if tensor.dtype is torch.float32 else MPI.DOUBLE
    spec = [tensor.numpy(), tensor.numel(), kind]
    return Prepared(tensor, lambda: world.comm.Allreduce(MPI.IN_PLACE, spec))
