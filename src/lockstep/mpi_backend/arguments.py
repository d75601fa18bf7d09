"""Refuse arguments of collective verbs that do not fit together. Everything here is Local."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lockstep.mpi_backend.buffers import check


def single(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the one tensor of a verb that takes one; refuse several with a ValueError."""
    check(tensors)
    if len(tensors) != 1:
        raise ValueError(
            f"the mpi backend was given {len(tensors)} tensors for one verb\n"
            "  needed: one tensor a call\n  to do:  call once for each tensor"
        )
    return tensors[0]


def one_a_rank(parts: Sequence[torch.Tensor], size: int, what: str) -> None:
    """Refuse a list that has not one tensor for each of the size ranks."""
    if len(parts) != size:
        raise ValueError(
            f"{len(parts)} {what} tensors were given for a group of {size} ranks\n"
            f"  needed: one {what} tensor a rank\n  to do:  make the list {size} long"
        )


def same_count(parts: Sequence[torch.Tensor], size: int, mine: torch.Tensor, what: str) -> None:
    """Refuse a list that has not one tensor like mine for each of the size ranks."""
    one_a_rank(parts, size, what)
    for i, part in enumerate(parts):
        if part.numel() != mine.numel() or part.dtype is not mine.dtype:
            raise ValueError(
                f"{what} tensor {i} is {part.dtype}{list(part.shape)}, this rank's own is "
                f"{mine.dtype}{list(mine.shape)}\n"
                f"  needed: the same dtype and number of elements in all of them\n"
                f"  to do:  pad to a common size, or use all_to_all_single with splits"
            )


def same_total(
    whole: torch.Tensor, part: torch.Tensor, size: int, whole_name: str, part_name: str
) -> None:
    """Refuse a whole that is not as large as the parts of all ranks."""
    if whole.numel() != part.numel() * size or whole.dtype is not part.dtype:
        raise ValueError(
            f"the {whole_name} is {whole.dtype}{list(whole.shape)} and the {part_name} "
            f"{part.dtype}{list(part.shape)} in a group of {size} ranks\n"
            f"  needed: the same dtype, and {size} times as many elements in the {whole_name}\n"
            f"  to do:  check both shapes against the size of the group"
        )
