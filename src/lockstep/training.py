"""What the training jobs share: the journal they keep, the test, the choice of a memory format.

Knows neither DistributedDataParallel nor the SGD written by hand; the loop itself is the job's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from lockstep.data import Batch, Images, in_order
from lockstep.metrics import EPOCH, RunDirectory
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


def evaluate(model: nn.Module, images: Images, batch_size: int, world: World) -> Score:
    """Test a model; every image counts exactly once, however many ranks there are. Collective.

    Args:
        model: gives logarithms of probabilities, [n, 10].
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
            loss = F.nll_loss(output, y, reduction="sum")
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


class Journal:
    """Says what goes on, as the classic script does, and writes it down in the run directory.

    Making it and `epoch` are Collective, the rest is Local; the root prints and writes.

    Args:
        name: of the job.
        settings: printed, and written to settings.json.
        world: the ranks.
        images: number of images of an epoch.
        facts: what else to say and to write about the run.

    Attributes:
        world: the ranks.
    """

    def __init__(
        self, name: str, settings: Classic, world: World, images: int, **facts: Any
    ) -> None:
        label = f"{name}-{settings.group_name}" if settings.group_name else name
        self._run = RunDirectory(world, settings.run_dir, label, settings, facts)
        self.world, self._root, self._images = world, world.rank == 0, images
        self._interval = settings.log_interval
        self._share = settings.batch_size * world.size
        self.say(str(settings))
        for key, fact in facts.items():
            self.say(f"{key.replace('_', ' ')}: {fact}")
        self._begin = time.perf_counter()
        self._training = self._waited = 0.0

    def say(self, text: str) -> None:
        """Print on the root."""
        if self._root:
            print(text, flush=True)

    def start_epoch(self) -> None:
        """Begin to count seconds and losses anew."""
        self._epoch_begin = time.perf_counter()
        self._loss: torch.Tensor | None = None

    def step(self, epoch: int, number: int, batch: Batch, loss: torch.Tensor) -> None:
        """Note a step; print every log_interval-th, with the loss of the root's batch.

        Args:
            epoch: from 1.
            number: of the step, from 0.
            batch: what the ranks took.
            loss: the mean over the images of this rank; not looked at if it had none.
        """
        if n := len(batch.indices):
            # Stays on its device: to look at it would wait for the device at every step.
            weighted = loss.detach().double() * n
            self._loss = weighted if self._loss is None else self._loss + weighted
        if number % self._interval == 0 and self._root:
            done, value = number * self._share, loss.item()
            percent = 100.0 * done / self._images
            self.say(
                f"Train Epoch: {epoch} [{done}/{self._images} ({percent:.0f}%)]\tLoss: {value:.6f}"
            )
            self._run.record("step", epoch=epoch, images=done, loss=value)

    def epoch(self, epoch: int, test: Callable[[], Score], waited: float | None = None) -> None:
        """Note that the steps of an epoch are done, and test. Collective.

        Args:
            epoch: from 1.
            test: Collective; its time does not count as training.
            waited: seconds of communication since the start of the job, if they are known.
        """
        if self._loss is not None and self._loss.is_cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self._epoch_begin
        self._training += seconds
        share = None if waited is None else (waited - self._waited) / seconds
        self._waited = waited or 0.0
        score = test()
        self.say(
            f"\nTest set: Average loss: {score.loss:.4f}, Accuracy: {score.correct}/{score.total} "
            f"({score.accuracy:.2f}%)\nEpoch {epoch}: {seconds:.2f} s, "
            f"{self._images / seconds:.0f} images/s{_of_it(share)}\n"
        )
        self._run.record(
            EPOCH,
            epoch=epoch,
            train_loss=self._mean_loss(),
            test_loss=score.loss,
            accuracy=score.accuracy,
            seconds=seconds,
            communication_share=share,
        )

    def end(self, proofs: dict[str, float], share: float | None = None) -> None:
        """Print and write the totals and the proofs, and draw the curves.

        Args:
            proofs: what was proven, and the number that proves it.
            share: of communication, 0 to 1; by default what `epoch` was told.
        """
        if share is None:
            share = self._waited / self._training
        total = time.perf_counter() - self._begin
        self.say(f"Total: {total:.2f} s, training {self._training:.2f} s{_of_it(share)}")
        self._run.record(
            "total", seconds=total, training_seconds=self._training, communication_share=share
        )
        for name, value in proofs.items():
            self.say(f"{name} {value:.3g}" if value else f"{name} 0.0")
            self._run.record("proof", name=name, value=value)
        self._run.finish()
        self.say(f"Written to {self._run.path}")

    def _mean_loss(self) -> float:
        """Return the mean over the images of all ranks. Collective."""
        none = torch.zeros((), dtype=torch.float64)
        if dist.get_backend() == "nccl":
            none = none.cuda()
        loss = none if self._loss is None else self._loss
        dist.all_reduce(loss)
        return loss.item() / self._images


def _of_it(share: float | None) -> str:
    return "" if share is None else f", {share:.1%} of it communication"
