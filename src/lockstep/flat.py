"""Many tensors in one buffer: one sum, one formula for all of them."""

from __future__ import annotations

import torch
from torch import nn

# Elements a thread: with less, the calls themselves would count.
_BLOCK = 2**16


class Flat:
    """Tensors of one dtype and device as views of one buffer.

    Args:
        like: the tensors whose shapes and strides the views get, in order.
        buffer: of their dtype and device, as long as all of them; by default a new one.

    Attributes:
        buffer: one dimension, the sum of their sizes, zeros if it is new.
        views: one a tensor; a channels_last tensor gets a channels_last view.
        ends: where each view ends in the buffer, in elements.
    """

    def __init__(self, like: list[torch.Tensor], buffer: torch.Tensor | None = None) -> None:
        if buffer is None:
            count = sum(t.numel() for t in like)
            buffer = torch.zeros(count, dtype=like[0].dtype, device=like[0].device)
        self.buffer = buffer
        self.views: list[torch.Tensor] = []
        self.ends: list[int] = []
        start = 0
        for tensor in like:
            strides = _dense_strides(tensor)
            self.views.append(self.buffer.as_strided(tensor.shape, strides, start))
            start += tensor.numel()
            self.ends.append(start)


def blocks(buffer: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cut a flat buffer so that each block stays in the cache through several operations. Local."""
    return buffer.split(_BLOCK * torch.get_num_threads())


def by_kind(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Sort parameters by dtype and device, each in the given order. Local."""
    kinds: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    return list(kinds.values())


def _dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the tensor's own strides if it has no gaps, else those of a contiguous one."""
    return torch.empty_like(tensor, memory_format=torch.preserve_format).stride()
