"""Batch normalisation over the joined batch of all ranks, on any device.

torch's SyncBatchNorm refuses tensors on the CPU. This one sums written out, over any backend.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

_SHORT = (torch.float16, torch.bfloat16)


class _Sum(torch.autograd.Function):
    """The sum of a tensor over all ranks; so is its gradient, since every rank's loss has it."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradients[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class SynchronousBatchNorm(_BatchNorm):
    """BatchNorm whose mean and variance are those of the joined batch of all ranks.

    In training, forward and backward are Collective: every rank calls them as many times, in the
    same order, an empty batch included if another rank has data. In evaluation it is an ordinary
    BatchNorm and Local.

    Input and output: [N, C, *], floating point; N may differ between ranks. The running variance
    takes the unbiased one of the joined batch, as torch's BatchNorm does.
    Source: S. Ioffe, C. Szegedy, "Batch normalization", 2015; two passes (mean, then squares of
    the deviations) for accuracy.

    Args:
        group: the ranks whose batches are joined; by default all.
        the others as for torch.nn.BatchNorm2d.
    """

    def __init__(self, num_features: int, *arguments: Any, group: Any = None, **named: Any) -> None:
        super().__init__(num_features, *arguments, **named)
        self.group = group

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(
                f"found an input {list(input.shape)}\n  needed: [N, C, *]\n"
                "  to do:  add the dimension of the batch"
            )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise input. Collective in training."""
        self._check_input_dim(input)
        if not (self.training and dist.is_initialized()) or dist.get_world_size(self.group) == 1:
            return super().forward(input)
        # Sums of many numbers, and the count of them, need more digits than 16 bits have.
        given, input = input.dtype, input.float() if input.dtype in _SHORT else input
        axes = [0, *range(2, input.dim())]
        shape = [1, -1] + [1] * (input.dim() - 2)
        count = input.new_full((1,), input.numel() // input.shape[1])
        first = _Sum.apply(torch.cat([input.sum(axes), count]), self.group)
        total = first[-1].detach()
        mean = first[:-1] / total
        centred = input - mean.view(shape)
        variance = _Sum.apply(centred.square().sum(axes), self.group) / total
        self._remember(mean.detach(), variance.detach(), float(total))
        normal = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            normal = normal * self.weight.view(shape) + self.bias.view(shape)
        return normal.to(given)

    @torch.no_grad()
    def _remember(self, mean: torch.Tensor, variance: torch.Tensor, total: float) -> None:
        if not self.track_running_stats or self.num_batches_tracked is None:
            return
        self.num_batches_tracked += 1
        share = self.momentum
        if share is None:  # a plain average of all batches so far
            share = 1.0 / float(self.num_batches_tracked)
        unbiased = variance * (total / max(total - 1.0, 1.0))
        for running, value in ((self.running_mean, mean), (self.running_var, unbiased)):
            if running is not None:
                running.lerp_(value.to(running.dtype), share)


def synchronous_batchnorm(model: nn.Module, group: Any = None) -> nn.Module:
    """Replace every BatchNorm in a model by a synchronous one with the same state. Local.

    Returns:
        the model; a new module if the model itself is a BatchNorm.
    """
    if isinstance(model, _BatchNorm) and not isinstance(model, SynchronousBatchNorm):
        made = SynchronousBatchNorm(
            model.num_features,
            model.eps,
            model.momentum,
            model.affine,
            model.track_running_stats,
            group=group,
        )
        made.load_state_dict(model.state_dict())
        reference = next(iter([*model.parameters(), *model.buffers()]), None)
        if reference is not None:
            made.to(reference.device, reference.dtype)
        return made.train(model.training)
    for name, child in model.named_children():
        setattr(model, name, synchronous_batchnorm(child, group))
    return model
