"""Numbers of 16 bits.

Each rank adds up its part of the buffer in the full precision and rounds once more for the way
back; that second error is kept as well. H. Tang, X. Lian, C. Yu, T. Zhang, J. Liu, "DoubleSqueeze:
Parallel stochastic gradient descent with double-pass error-compensated compression", 2019.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from lockstep.compress.feedback import Bucket, Compressor

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Rounded(Compressor):
    """A reduce-scatter and an all-gather of bfloat16 or float16."""

    def __init__(self, name: str, buckets: list[Bucket], *rest: Any) -> None:
        super().__init__(name, buckets, *rest)
        self._short = _DTYPES[name]
        self._each = [-(-bucket.piece.numel() // self._size) for bucket in buckets]
        # What is left out on the way back, of the part that this rank adds up.
        self._back = [b.zeros(each) for b, each in zip(buckets, self._each, strict=True)]

    def _tensors(self) -> list[torch.Tensor]:
        return [*self._kept, *self._back]

    def _exchange(self, number: int, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        count, each = len(wanted), self._each[number]
        leaving = torch.zeros(self._size * each, dtype=self._short, device=wanted.device)
        leaving[:count] = round_to(wanted, self._short)
        everyone = torch.empty_like(leaving)
        dist.all_to_all_single(_bytes(everyone), _bytes(leaving), group=self._group)
        part, back = self._back[number].clone(), self._back[number]
        for summand in everyone.view(self._size, each):
            part += summand
        result = round_to(part, self._short)
        if self._feedback:
            torch.sub(part, result.to(part.dtype), out=back)
            back.nan_to_num_(0.0, 0.0, 0.0)
        dist.all_gather_single(_bytes(everyone), _bytes(result), group=self._group)
        self.sent += (leaving.nbytes + result.nbytes * self._size) * (self._size - 1) // self._size
        return everyone[:count].to(wanted.dtype), leaving[:count].to(wanted.dtype)


def round_to(numbers: torch.Tensor, short: torch.dtype) -> torch.Tensor:
    """Round numbers to 16 bits; what is too large for them becomes the largest. Local.

    Infinities and NaN stay what they are, so that they are seen.
    """
    largest = torch.finfo(short).max
    bounded = torch.where(numbers.isinf(), numbers, numbers.clamp(-largest, largest))
    return bounded.to(short)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Every backend can carry bytes."""
    return tensor.view(torch.uint8)
