"""The largest numbers of each rank, with their places.

S. U. Stich, J.-B. Cordonnier, M. Jaggi, "Sparsified SGD with memory", 2018.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from lockstep.compress.feedback import Compressor


class Sparse(Compressor):
    """An all-gather of numbers and places; each rank adds them up in the order of the ranks."""

    def _exchange(self, number: int, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k = count_of(self._number, len(wanted))
        message, given = largest(wanted, k)
        everyone = message.new_empty(self._size * len(message))
        dist.all_gather_single(everyone, message, group=self._group)
        self.sent += message.nbytes * (self._size - 1)
        return add_up(everyone.view(self._size, -1), wanted, k), given


def count_of(share: float, length: int) -> int:
    """Return how many numbers of so many are sent: one at least, if there is one. Local."""
    return min(length, max(1, round(share * length)))


def largest(numbers: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pick the k numbers of the largest absolute value; NaN counts as larger than all. Local.

    Args:
        numbers: flat, float32 or float64, fewer than 2^31.
        k: how many.

    Returns:
        a message of int32, that holds the bits of the numbers and then their places; and a tensor
        like numbers, with zeros for all others.
    """
    places = numbers.abs().topk(k, sorted=False).indices
    chosen = numbers[places]
    message = torch.cat([chosen.view(torch.int32), places.to(torch.int32)])
    return message, torch.zeros_like(numbers).index_copy_(0, places, chosen)


def add_up(messages: torch.Tensor, like: torch.Tensor, k: int) -> torch.Tensor:
    """Add up the messages of all ranks; the order is theirs, so the bits are everywhere the same.

    Args:
        messages: int32, a row a rank.
        like: a tensor as `largest` got it.
        k: as there.
    """
    total = torch.zeros_like(like)
    for message in messages:
        # Cloned, since numbers of 64 bits may lie askew in it.
        chosen, places = message[:-k].clone().view(like.dtype), message[-k:].to(torch.int64)
        # No place is there twice in one message.
        total.index_add_(0, places, chosen)
    return total
