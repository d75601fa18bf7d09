"""The journal of the MNIST jobs: what the classic script prints, and the run directory."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from lockstep import notes
from lockstep.data import Batch
from lockstep.metrics import EPOCH, STEP
from lockstep.settings import Classic
from lockstep.training import Score
from lockstep.world import World


class Journal:
    """Says what goes on, as the classic script does, and writes it down in the run directory.

    Making it, `epoch` and `end` are Collective, the rest is Local; the root prints and writes.

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
        self._run = settings.run_directory(world, name, **facts)
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
        notes.step()
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
            self._run.record(STEP, epoch=epoch, images=done, loss=value)

    def epoch(self, epoch: int, test: Callable[[], Score], waited: float | None = None) -> None:
        """Note that the steps of an epoch are done, and test. Collective.

        Args:
            epoch: from 1.
            test: Collective; its time does not count as training.
            waited: seconds of communication since the start of the job, if they are known.
        """
        notes.no_step()
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
            images_per_second=self._images / seconds,
        )
        self._run.check()

    def end(self, proofs: dict[str, float], share: float | None = None) -> None:
        """Print and write the totals and the proofs, and draw the curves. Collective.

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
