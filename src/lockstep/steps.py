"""A training step of all ranks: by DistributedDataParallel, or by the all-reduce written by hand.

Both take the step of the joined batch: every image counts the same, however unevenly the images
are spread over ranks and micro-batches, and buffers (statistics of BatchNorm) are the root's
after each step. Only the model's own BatchNorm looks at less than the joined batch; see
`lockstep.batchnorm`.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.replicas import clip, equalize, share
from lockstep.sgd import synchronous
from lockstep.world import World

# Looked at before torch's compiler is loaded, which names one itself.
_CACHE = "TORCHINDUCTOR_CACHE_DIR"
_HAS_CACHE = _CACHE in os.environ

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Part = tuple[torch.Tensor, torch.Tensor]


def parts_of(x: torch.Tensor, y: torch.Tensor, total: int, size: int, most: int) -> list[Part]:
    """Cut a rank's share of a batch into micro-batches, on every rank the same number. Local.

    Args:
        x: images [n, …]; n is total / size, rounded up or down, on every rank.
        y: labels [n].
        total: images on all ranks together.
        size: number of ranks.
        most: images of a micro-batch.

    Returns:
        micro-batches that differ by one image at most; an empty one if n is 0.
    """
    number = max(1, -(-total // (size * most)))
    if number == 1:
        return [(x, y)]
    return list(zip(x.tensor_split(number), y.tensor_split(number), strict=True))


class Step(ABC):
    """What both ways to step have in common. Making one is Collective: all get the root's model.

    Args:
        model: on its device, in its memory format; trained in place.
        optimizer: of its parameters.
        world: the ranks.
        loss: the sum over the images, of outputs [n, …] and labels [n]; a scalar.
        amp: compute the forward pass under autocast in this dtype; None without.
        max_norm: clip the joined gradient to this norm; None without.
        compiled: let torch.compile make one kernel of many.
        deterministic: give the same bits again after a resume, on as many ranks.

    Attributes:
        module: the model itself, for a test or a checkpoint.
        optimizer: the torch optimizer, for a schedule.
        world: the ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        world: World,
        *,
        loss: Loss,
        amp: torch.dtype | None = None,
        max_norm: float | None = None,
        compiled: bool = False,
        deterministic: bool = False,
    ) -> None:
        self.module, self.optimizer = model, optimizer
        self._forward: nn.Module = model
        if compiled:
            self._forward = _compiled(model)
        self.world, self._sum_of_losses = world, loss
        self._amp, self._max_norm = amp, max_norm
        self._open(deterministic)

    @abstractmethod
    def step(self, parts: Sequence[Part], total: int) -> torch.Tensor:
        """Take one step of the optimizer. Collective.

        Args:
            parts: micro-batches of this rank, one at least, as many on every rank; empty ones are
                allowed if another rank has images.
            total: images of all parts of all ranks, 1 or more.

        Returns:
            the mean loss over this rank's images, a detached scalar; 0 if there are none.
        """

    @property
    @abstractmethod
    def communication_seconds(self) -> float | None:
        """Seconds that the calling thread has waited for others; None if it cannot know."""

    @abstractmethod
    def _open(self, deterministic: bool) -> None:
        """Get ready. Collective."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the model and of the optimizer. Local."""
        return {"model": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over such a state; the same on all ranks. Local."""
        self.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def _loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, self._amp, enabled=self._amp is not None):
            output = self._forward(x)
        # In float32 or better also under autocast: a sum over many images needs the digits.
        wide = output.float() if output.dtype in (torch.bfloat16, torch.float16) else output
        return self._sum_of_losses(wide, y)


class DistributedStep(Step):
    """By torch's DistributedDataParallel."""

    def _open(self, deterministic: bool) -> None:
        equalize(self.module)
        self._buffers = list(self.module.buffers())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # compiled models are wrapped on purpose
            # DDP cuts its buckets anew after the first step, unless it looks for unused
            # parameters. The order of additions, and so the bits, would depend on where a run
            # was stopped and resumed.
            self._forward = DistributedDataParallel(
                self._forward,
                broadcast_buffers=False,
                gradient_as_bucket_view=True,
                find_unused_parameters=deterministic,
            )

    communication_seconds = None

    def step(self, parts: Sequence[Part], total: int) -> torch.Tensor:
        """Take one step of the optimizer; see `Step.step`. Collective."""
        self.optimizer.zero_grad()
        sums: list[torch.Tensor] = []
        for number, (x, y) in enumerate(parts, start=1):
            last = number == len(parts)
            ddp: Any = self._forward
            with nullcontext() if last else ddp.no_sync():
                loss = self._loss(x, y)
                # DDP takes the mean over the ranks; this makes it the mean over all images.
                (loss * (self.world.size / total)).backward()
            sums.append(loss.detach())
        if self._max_norm is not None:
            clip([p.grad for p in self.module.parameters() if p.grad is not None], self._max_norm)
        self.optimizer.step()
        share(self._buffers)
        return _mean(sums, parts)


class AllReduceStep(Step):
    """By the sum over ranks that `lockstep.allreduce` writes out."""

    def _open(self, deterministic: bool) -> None:
        self._sgd: Any = synchronous(
            self.optimizer, self.world, model=self.module, max_norm=self._max_norm
        )

    @property
    def communication_seconds(self) -> float:
        """Seconds that the calling thread has waited for others."""
        seconds: float = self._sgd.communication_seconds
        return seconds

    def step(self, parts: Sequence[Part], total: int) -> torch.Tensor:
        """Take one step of the optimizer; see `Step.step`. Collective."""
        self._sgd.zero_grad()
        sums: list[torch.Tensor] = []
        for number, (x, y) in enumerate(parts, start=1):
            last = number == len(parts)
            with nullcontext() if last else self._sgd.accumulate():
                loss = self._loss(x, y)
                self._sgd.backward(loss / max(1, len(y)), examples=len(y))
            sums.append(loss.detach())
        self._sgd.step()
        return _mean(sums, parts)


def _compiled(model: nn.Module) -> nn.Module:
    """Compile, with a cache of this process's own unless the user has named one.

    In the one that processes share by default, a compiler that was killed leaves half a library, at
    which every later run would fail.
    """
    if not _HAS_CACHE:
        made = tempfile.mkdtemp(prefix="lockstep-compiled-")
        os.environ[_CACHE] = made
        atexit.register(shutil.rmtree, made, ignore_errors=True)
    compiled: Any = torch.compile(model)
    forward: nn.Module = compiled
    return forward


def _mean(sums: Sequence[torch.Tensor], parts: Sequence[Part]) -> torch.Tensor:
    return torch.stack(list(sums)).sum() / max(1, sum(len(y) for _, y in parts))
