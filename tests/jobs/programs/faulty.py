"""A job as it is, with faults in what its data gives it.

    faulty.py HOW:RANK:WHEN[,…] jobs/JOB.py [flags of the job]

Each fault happens on one rank, when its WHEN-th batch is taken: 5 of training, test1 of the test;
save1 is the first checkpoint. One that happens at a batch happens before the batch is handed out.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

import lockstep.checkpoint
import lockstep.data
import lockstep.training


class Faults:
    """What goes wrong on this rank, by when it does."""

    def __init__(self, text: str) -> None:
        self._all = [fault.split(":") for fault in text.split(",")]
        self._counts: Counter[str] = Counter()
        self._skipped = False

    def come(self, kind: str) -> bool:
        """Count a batch or a checkpoint, and let happen what is due; say whether to skip it."""
        self._counts[kind] += 1
        now = f"{kind}{self._counts[kind]}"
        due = [how for how, rank, when in self._all if when == now and int(rank) == dist.get_rank()]
        for how in due:
            event()
            go_wrong(how)
        self._skipped = self._skipped or "skip" in due
        return "skip" in due

    def batches(self, original: Callable[..., Iterable[Any]], kind: str) -> Callable[..., Any]:
        """Return a function that shares out batches, with faults."""

        def shares(*args: Any, **named: Any) -> Iterator[Any]:
            for batch in original(*args, **named):
                if not self.come(kind):
                    yield batch
            if self._skipped:
                event()  # only now has this rank less to do than the others

        return shares

    def before(self, original: Callable[..., Any], kind: str) -> Callable[..., Any]:
        """Return a function before which faults may happen."""

        def function(*args: Any, **named: Any) -> Any:
            self.come(kind)
            return original(*args, **named)

        return function


def event() -> None:
    """Say when it happened."""
    print(f"event {time.time()}", flush=True)


def go_wrong(how: str) -> None:
    """Do what the others do not expect."""
    match how:
        case "loop" | "slow":
            end = time.monotonic() + (120 if how == "loop" else 10)
            while time.monotonic() < end:
                pass  # looks for the next image
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "doomed":  # goes on, and dies while others give a verdict
            threading.Timer(5.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
        case "term":
            os.kill(os.getpid(), signal.SIGTERM)
        case "exit":
            sys.exit(3)
        case "raise":
            raise ValueError("boom on purpose")
        case "verb":
            dist.broadcast(torch.ones(7), 0)
        case "shape":
            dist.all_reduce(torch.ones(7))
        case "longer":
            dist.all_reduce(torch.ones(10**6))


def main() -> None:
    """Prepare the faults and become the job."""
    text, job, *flags = sys.argv[1:]
    faults = Faults(text)
    lockstep.data.batches = faults.batches(lockstep.data.batches, "")
    lockstep.training.in_order = faults.batches(lockstep.training.in_order, "test")
    store = lockstep.checkpoint.Checkpoints
    store.save = faults.before(store.save, "save")  # type: ignore[method-assign]
    sys.argv = [job, *flags]
    runpy.run_path(job, run_name="__main__")


if __name__ == "__main__":
    main()
