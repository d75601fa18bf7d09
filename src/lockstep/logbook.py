"""What a long training says and writes down: lines or a bar, steps, epochs, its end.

It knows the number of every step since the start of the training, so that a run that was cut off
goes on in the same files.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from lockstep import notes
from lockstep.metrics import EPOCH, STEP, RunDirectory
from lockstep.progress import Progress
from lockstep.world import World


class Logbook:
    """Says and writes down how a training goes. The root prints and writes.

    `epoch`, `end` and `leave` are Collective, the rest is Local. Use it in a ``with``: its end
    takes the bar off the terminal.

    Args:
        world: the ranks.
        run: where to write.
        epochs: number of epochs.
        steps: number of steps of an epoch.
        interval: steps between two lines.
    """

    def __init__(
        self, world: World, run: RunDirectory, *, epochs: int, steps: int, interval: int = 50
    ) -> None:
        self._world, self._run, self._interval = world, run, interval
        self._epochs, self._steps = epochs, steps
        self.progress = Progress(world.rank == 0)
        self._begin = self._mark = time.perf_counter()
        self._images = self._waited = 0.0
        self._before = 0.0
        self._training = self._epoch_images = self._epoch_seconds = 0.0
        self._sums: torch.Tensor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.progress.stop()

    def say(self, text: str) -> None:
        """Print on the root."""
        self.progress.say(text)

    def resumed(self, global_step: int, seconds: float = 0.0) -> None:
        """Say that the training goes on after so many steps.

        Args:
            global_step: steps done; what was recorded of later ones is superseded.
            seconds: of training before, for the total.
        """
        self._run.resumed(global_step)
        self._before = seconds

    @property
    def seconds(self) -> float:
        """Seconds of training so far, tests left out, those before a restart included."""
        return self._before + self._training

    def start_epoch(self, epoch: int, done: int = 0, sums: list[float] | None = None) -> None:
        """Begin an epoch, or go on with it.

        Args:
            epoch: from 1.
            done: steps of it that were done before a restart.
            sums: what `sums` returned then, on this rank.
        """
        self.progress.start(epoch, self._epochs, self._steps, done)
        self._mark = time.perf_counter()
        self._images = 0.0
        self._epoch_images = self._epoch_seconds = 0.0
        self._sums = None if sums is None else torch.tensor(sums, dtype=torch.float64)

    def sums(self) -> list[float]:
        """Return this rank's loss times images, and images, of the epoch so far.

        They belong into a checkpoint, so that the mean of an epoch that was cut off is exact.
        """
        return [0.0, 0.0] if self._sums is None else self._sums.tolist()

    def step(
        self,
        *,
        epoch: int,
        number: int,
        global_step: int,
        loss: torch.Tensor,
        images: int,
        total: int,
        waited: float | None = None,
    ) -> None:
        """Note a step; every interval-th, and the last, is printed and recorded.

        Args:
            epoch: from 1.
            number: steps of the epoch that are done, this one included.
            global_step: steps of the training that are done.
            loss: the mean over the images of this rank; not looked at if it had none.
            images: number of this rank; total: of all ranks.
            waited: seconds that this rank has waited for communication since the start, if known.
        """
        notes.step()
        self._images += total
        if images:
            self._add(loss.detach().double() * images, images)
        if number % self._interval == 0 or number == self._steps:
            value = loss.item() if images else float("nan")
            self._report(value, waited, {"epoch": epoch, "step": number}, global_step)
        self.progress.step(number)

    def _add(self, loss: torch.Tensor, images: int) -> None:
        """Add to the sums; they stay on their device: to look would wait for it at every step."""
        pair = torch.stack((loss, torch.full_like(loss, images)))
        self._sums = pair if self._sums is None else self._sums.to(pair.device) + pair

    def _report(
        self, loss: float, waited: float | None, where: dict[str, int], global_step: int
    ) -> None:
        seconds, speed, share = self._lap(waited)
        self.say(
            f"rank {self._world.rank} epoch {where['epoch']} step {where['step']}/{self._steps} "
            f"loss {loss:.4f} {speed:.0f} images/s"
        )
        self._run.record(
            STEP,
            **where,
            global_step=global_step,
            loss=loss,
            images_per_second=speed,
            communication_share=share,
            seconds=seconds,
        )

    def _lap(self, waited: float | None) -> tuple[float, float, float | None]:
        """Return the seconds since the last lap, images a second, the share of communication."""
        now = time.perf_counter()
        seconds = max(now - self._mark, 1e-9)
        share = None if waited is None else (waited - self._waited) / seconds
        speed = self._images / seconds
        self._epoch_images += self._images
        self._epoch_seconds += seconds
        self._training += seconds
        self._mark, self._images, self._waited = now, 0.0, waited or 0.0
        return seconds, speed, share

    def epoch(
        self, epoch: int, global_step: int, accuracy: float, test_loss: float, **more: Any
    ) -> None:
        """Note that an epoch is done and tested: a row of results.csv. Collective.

        Args:
            epoch: from 1.
            global_step: steps of the training that are done.
            accuracy: percent of the test images.
            test_loss: mean over them.
            more: further columns.

        Raises:
            StorageError: on all ranks: something could not be written to the run directory.
        """
        notes.no_step()
        self.progress.stop()
        loss = self._mean_loss()
        speed = self._epoch_images / max(self._epoch_seconds, 1e-9)
        self.say(
            f"epoch {epoch}: loss {loss:.4f}, test loss {test_loss:.4f}, "
            f"test accuracy {accuracy:.2f} %, {self._epoch_seconds:.1f} s, {speed:.0f} images/s"
        )
        self._run.record(
            EPOCH,
            epoch=epoch,
            loss=loss,
            acc=accuracy,
            test_loss=test_loss,
            seconds=self._epoch_seconds,
            images_per_second=speed,
            global_step=global_step,
            **more,
        )
        self._run.check()

    def end(self, proofs: dict[str, float] | None = None) -> None:
        """Print and write the totals and the proofs, and mark the run as done. Collective.

        Raises:
            StorageError: on all ranks: something could not be written; the run is not done then.
        """
        self.progress.stop()
        total = time.perf_counter() - self._begin
        self.say(f"Total: {total:.2f} s, training {self.seconds:.2f} s")
        self._run.record("total", seconds=total, training_seconds=self.seconds)
        for name, value in (proofs or {}).items():
            self.say(f"{name} {value:.3g}" if value else f"{name} 0.0")
            self._run.record("proof", name=name, value=value)
        self._run.finish()
        self.say(f"Written to {self._run.path}")

    def leave(self, why: str) -> None:
        """Say why the training stops before its end, and write what there is. Collective."""
        self.progress.stop()
        self.say(why)
        self._run.leave()

    def _mean_loss(self) -> float:
        """Return the mean over the images of all ranks in this epoch. Collective."""
        sums = torch.tensor(self.sums(), dtype=torch.float64)
        if dist.get_backend() == "nccl":
            sums = sums.cuda()
        dist.all_reduce(sums)
        loss, images = sums.tolist()
        return loss / images if images else float("nan")
