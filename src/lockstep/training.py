"""What the training jobs share: the test, and the choice of a memory format.

Knows neither DistributedDataParallel nor the SGD written by hand; the loop itself is the job's.
"""

from __future__ import annotations

import time
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from lockstep.data import ImageSet, in_order
from lockstep.settings import Classic
from lockstep.world import World


@dataclass(frozen=True)
class Score:
    """The outcome of a test.

    Attributes:
        loss: negative log-likelihood, the mean over the images.
        correct, total: number of images that were recognised, and of all.
    """

    loss: float
    correct: int
    total: int

    @property
    def accuracy(self) -> float:
        """Percent."""
        return 100.0 * self.correct / self.total


def evaluate(model: nn.Module, images: ImageSet, batch_size: int, world: World) -> Score:
    """Test a model; every image counts exactly once, however many ranks there are. Collective.

    Args:
        model: gives logits, or logarithms of probabilities, [n, classes].
        images: the same set on all ranks; each looks at its share.
        batch_size: images at a time.
        world: the ranks.
    """
    was_training = model.training
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=images.labels.device)
    with torch.no_grad():
        for _, x, y in images.take(in_order(len(images), batch_size, world)):
            output = model(x)
            # Of logarithms of probabilities it is the negative log-likelihood.
            loss = F.cross_entropy(output, y, reduction="sum")
            correct = (output.argmax(dim=1) == y).sum()
            sums += torch.stack((loss.double(), correct.double(), torch.tensor(len(y)).to(loss)))
    dist.all_reduce(sums)
    model.train(was_training)
    loss, correct, total = sums.tolist()
    return Score(loss / total, int(correct), int(total))


def lay_out(
    model: nn.Module, settings: Classic, device: torch.device
) -> tuple[nn.Module, torch.memory_format, dict[str, Any]]:
    """Put a model on its device, in the memory format in which its step is faster. Collective.

    Args:
        model: takes images [n, 1, 28, 28]; only moved, not trained.
        settings: channels_last: "on" and "off" are obeyed, "auto" measures; batch_size.
        device: where to.

    Returns:
        the model; the format, the same on all ranks; and what to say of it.
    """
    model = model.to(device)
    layout, facts = torch.contiguous_format, {}
    if settings.channels_last == "on":
        layout = torch.channels_last
    elif settings.channels_last == "auto":
        gain = _gain(model, settings.batch_size, device)
        layout = torch.channels_last if gain > 1.0 else torch.contiguous_format
        facts = {"channels_last_is_faster_by": round(gain, 2)}
    anything: Any = model
    return anything.to(memory_format=layout), layout, {"memory_format": str(layout), **facts}


def _gain(model: nn.Module, batch_size: int, device: torch.device) -> float:
    """Return how many times faster a step of a copy is in channels_last. Collective."""
    formats = (torch.contiguous_format, torch.channels_last)
    anything: list[Any] = [deepcopy(model) for _ in formats]
    copies = [copy.to(memory_format=it) for copy, it in zip(anything, formats, strict=True)]
    x = torch.rand(batch_size, 1, 28, 28, device=device)
    times: list[list[float]] = [[], []]
    for _ in range(10):
        for copy, layout, taken in zip(copies, formats, times, strict=True):
            taken.append(_step_seconds(copy, x.contiguous(memory_format=layout)))
    # The fastest, which neither the first turn nor other work on the machine has slowed down.
    fastest = torch.tensor([min(taken) for taken in times], device=device)
    dist.all_reduce(fastest)
    return (fastest[0] / fastest[1]).item()


def _step_seconds(model: nn.Module, x: torch.Tensor) -> float:
    start = time.perf_counter()
    model(x).sum().backward()
    if x.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start
