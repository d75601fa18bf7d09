"""Tensors as memory that MPI can read and write.

MPI wants an address and a count. A tensor that is contiguous has them; one that is not, or is a
conjugate view, is copied into a staging tensor and, if MPI writes to it, copied back. Everything
here is Local.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from mpi4py import MPI

from lockstep.mpi_backend.datatypes import Arithmetic

# Counts are C ints on many paths of many MPIs, and some transports fail above 2 GiB a message.
LARGEST_COUNT = 2**30

_STRIDED = torch.strided

Spec = list[object]


def check(tensors: Sequence[torch.Tensor]) -> None:
    """Refuse what MPI cannot reach, by name.

    Raises:
        TypeError: a tensor is not on the CPU, or is sparse, quantized or otherwise not strided.
    """
    for tensor in tensors:
        if tensor.is_cpu and tensor.layout is _STRIDED and not tensor.is_quantized:
            continue
        if not tensor.is_cpu:
            raise TypeError(
                f"the mpi backend cannot take a tensor on device {tensor.device}\n"
                "  needed: tensors on the CPU\n"
                '  to do:  init_process_group("cpu:mpi,cuda:nccl", …) sends CUDA tensors by nccl; '
                "or tensor.cpu() first"
            )
        kind = "quantized" if tensor.is_quantized else str(tensor.layout)
        raise TypeError(
            f"the mpi backend cannot take a {kind} tensor\n"
            "  needed: a dense tensor\n  to do:  tensor.to_dense() or tensor.dequantize() first"
        )


def check_written(tensors: Sequence[torch.Tensor]) -> None:
    """Refuse tensors to write to in which several elements lie at one place.

    Raises:
        ValueError: naming the shape and strides.
    """
    for tensor in tensors:
        if not tensor.is_contiguous() and torch._debug_has_internal_overlap(tensor) == 1:
            raise ValueError(
                f"the mpi backend cannot write to a tensor {list(tensor.shape)} with strides "
                f"{list(tensor.stride())}: several of its elements lie at one place\n"
                "  needed: a tensor with a place for each element\n  to do:  tensor.clone() first"
            )


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's numbers in order in one piece: itself if it is so, else a copy."""
    tensor = tensor.detach()
    if is_plain(tensor):
        return tensor
    return tensor.resolve_conj().resolve_neg().contiguous()


def is_plain(tensor: torch.Tensor) -> bool:
    """Say whether the tensor's memory is its numbers, in order, without gaps."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def give_back(staged: torch.Tensor, target: torch.Tensor) -> None:
    """Copy a staging tensor into the tensor it stands for, unless they share their memory."""
    target = target.detach()
    if staged.data_ptr() != target.data_ptr() or not is_plain(target):
        target.copy_(staged.view(target.shape))


def memory(tensor: torch.Tensor) -> MPI.buffer:
    """Return the memory of a contiguous tensor."""
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)


def numbers(tensor: torch.Tensor, row: Arithmetic) -> Spec:
    """Describe a contiguous tensor of the wire dtype to MPI as numbers to compute with."""
    return [memory(tensor), tensor.numel(), row.datatype]


def pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Cut a contiguous tensor into flat pieces that no int overflows on; usually one."""
    if tensor.numel() <= LARGEST_COUNT:
        yield tensor
    else:
        yield from tensor.view(-1).split(LARGEST_COUNT)


class blocks:  # spelled like a function, since it is used like one
    """Give the count and the datatype that describe a block of bytes, however long it is.

    A block too long for a C int is one element of a datatype made for it, which is freed when the
    ``with`` ends; MPI keeps it for as long as a message of it is under way.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._made: list[MPI.Datatype] = []

    def __enter__(self) -> tuple[int, MPI.Datatype]:
        if self._nbytes <= LARGEST_COUNT:
            return self._nbytes, MPI.BYTE
        whole, rest = divmod(self._nbytes, LARGEST_COUNT)
        unit = MPI.BYTE.Create_contiguous(LARGEST_COUNT)
        kinds, counts, places = [unit], [whole], [0]
        if rest:
            kinds, counts, places = [unit, MPI.BYTE], [whole, rest], [0, whole * LARGEST_COUNT]
        block = MPI.Datatype.Create_struct(counts, places, kinds).Commit()
        self._made = [block, unit]
        return 1, block

    def __exit__(self, *_: object) -> None:
        for datatype in self._made:
            datatype.Free()
