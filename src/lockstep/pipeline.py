"""Stages of work that run behind each other, each in a thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

Stage = Callable[[Any], None]


class Line:
    """Takes pieces of work through all stages in order; the next piece enters a stage behind it.

    Everything is Local; what the stages do may not be.

    Args:
        stages: called with each piece.
        overlap: in threads; otherwise all of it runs where it is put in.
    """

    def __init__(self, stages: Sequence[Stage], *, overlap: bool) -> None:
        self._stages, self.overlaps = stages, overlap
        self._threads = [
            ThreadPoolExecutor(1, f"lockstep-sum-{i}") for i in range(len(stages)) if overlap
        ]
        self._under_way: list[Future[None]] = []

    def put(self, piece: Any, *, wait: bool = False) -> None:
        """Take a piece through the stages behind all that were put in before.

        Args:
            piece: for the stages.
            wait: the caller has nothing else to do: if nothing is under way it may do it itself.
        """
        alone = len(self._stages) == 1 and all(work.done() for work in self._under_way)
        if not self.overlaps or (wait and alone):
            self.finish()  # raises what went wrong before
            for stage in self._stages:
                stage(piece)
            return
        before: Future[None] | None = None
        for thread, stage in zip(self._threads, self._stages, strict=True):
            before = thread.submit(_after, before, stage, piece)
        assert before is not None
        self._under_way.append(before)

    def finish(self) -> None:
        """Wait until all pieces are through; raise the first error of a stage."""
        try:
            for work in self._under_way:
                work.result()
        finally:
            # What still runs when a signal handler raises is waited for the next time.
            self._under_way = [work for work in self._under_way if not work.done()]

    def close(self) -> None:
        """Stop the threads when what is under way is over; do not wait for them."""
        for thread in self._threads:
            thread.shutdown(wait=False)


def _after(before: Future[None] | None, stage: Stage, piece: Any) -> None:
    if before is not None:
        before.result()
    stage(piece)
