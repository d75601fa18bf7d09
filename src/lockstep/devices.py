"""The device that a rank computes on."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from lockstep.errors import DeviceError
from lockstep.rendezvous.agree import Trouble, combine, gather
from lockstep.world import World

_WANTED = ("auto", "cpu", "cuda")


def device(
    world: World, wanted: str = "auto", *, tf32: bool = False, cudnn_benchmark: bool = False
) -> torch.device:
    """Return the device of this rank, on all ranks of the same kind. Collective.

    Of several visible GPUs a rank takes the one of its local rank, of one visible GPU that one. Two
    ranks never share a GPU. The GPU becomes the current one of the process.

    Args:
        world: the ranks that choose together.
        wanted: "cuda", "cpu", or "auto": cuda if every rank has a GPU of its own, otherwise cpu.
        tf32: let float32 matrix products and convolutions on GPUs use TF32 (10 bits of mantissa).
        cudnn_benchmark: let cuDNN try its algorithms for each new shape; faster, not reproducible.

    Raises:
        DeviceError: on all ranks, if cuda is asked for and some rank has no GPU of its own.
    """
    gpus = _visible() if wanted != "cpu" else []
    everyone = gather(world, (world.host, wanted, world.node, world.local_rank, gpus))
    troubles = [(host, None if it in _WANTED else _unknown(it)) for host, it, *_ in everyone]
    if error := combine(troubles, DeviceError):
        raise error
    if all(it == "cpu" for _, it, *_ in everyone):
        return torch.device("cpu")
    missing = lacking([(node, local, theirs) for _, _, node, local, theirs in everyone])
    hosts = [host for host, *_ in everyone]
    if error := combine(list(zip(hosts, missing, strict=True)), DeviceError):
        if any(it == "cuda" for _, it, *_ in everyone):
            raise error
        if world.rank == 0 and any(theirs for *_, theirs in everyone):
            sys.stderr.write(f"lockstep: all ranks compute on the CPU: {error.found}\n")
        return torch.device("cpu")
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.benchmark = cudnn_benchmark
    chosen = torch.device("cuda", _index(world.local_rank, gpus))
    torch.cuda.set_device(chosen)
    return chosen


def lacking(everyone: Sequence[tuple[int, int, Sequence[str]]]) -> list[Trouble | None]:
    """Say for each rank why it has no GPU of its own, None where it has. Local.

    Args:
        everyone: each rank's node, local rank, and the identities of the GPUs that it sees.
    """
    found: list[Trouble | None] = []
    taken: dict[tuple[int, str], int] = {}
    for rank, (node, local_rank, gpus) in enumerate(everyone):
        index = _index(local_rank, gpus)
        if not gpus:
            found.append(_too_few("no GPU is visible"))
        elif index >= len(gpus):
            found.append(_too_few(f"{len(gpus)} GPUs for local rank {local_rank}"))
        elif (other := taken.setdefault((node, gpus[index]), rank)) != rank:
            found.append(_too_few(f"its GPU is that of rank {other}"))
        else:
            found.append(None)
    return found


def _index(local_rank: int, gpus: Sequence[str]) -> int:
    return 0 if len(gpus) == 1 else local_rank


def _visible() -> list[str]:
    """Return the identities of the GPUs that this process sees. Local."""
    if not torch.cuda.is_available():
        return []
    return [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]


def _too_few(found: str) -> Trouble:
    return Trouble(
        found,
        needed="a GPU of its own for every rank, and a torch that can use it",
        cure="`nvidia-smi -L` and CUDA_VISIBLE_DEVICES show what there is; start as many ranks a "
        'node as it has GPUs (srun --gpus-per-task=1); or take "cpu"',
    )


def _unknown(wanted: str) -> Trouble:
    return Trouble(
        f"device {wanted!r}", needed=" or ".join(_WANTED), cure="--device auto, cpu or cuda"
    )
