"""What a verb returns: something to wait for.

torch wraps every Work that a Python backend returns into a C++ object that passes on ``wait`` and
``get_future`` only; `lockstep.mpi_backend.torch_gaps` mends the rest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch.futures import Future

from lockstep.errors import CollectiveTimeout

if TYPE_CHECKING:
    _Work = object
else:
    from torch._C._distributed_c10d import Work as _Work

# The Work that was last asked for its future in this thread; see torch_gaps.
asked = threading.local()


def later(outcome: Callable[[], object]) -> tuple[Future, Future]:
    """Return a switch, and a future that takes the outcome when the switch is set. Local.

    What the outcome raises is an error of the future for C++ too. `Future.set_exception` leaves the
    exception there as a value, in which DDP looks for tensors and reads from address 0.

    Args:
        outcome: returns what the future is to hold, or raises; called by whoever sets the switch.
    """
    switch: Future = Future()
    return switch, switch.then(lambda _: outcome())


class Finished(_Work):
    """The Work of a verb that was over before it returned.

    Args:
        result: the tensors that its future holds.
    """

    def __init__(self, result: object = None) -> None:
        super().__init__()
        self._result = result

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return at once. Local."""
        return True

    def is_completed(self) -> bool:
        """Return True. Local."""
        return True

    def failure(self) -> BaseException | None:
        """Return None: a verb that fails in the calling thread raises there. Local."""
        return None

    def get_future(self) -> Future:
        """Return a future that already holds the result. Local."""
        asked.work = self
        future: Future = Future()
        future.set_result(self._result)
        return future


class Pending(_Work):
    """The Work of a verb that another thread carries out.

    Args:
        label: verb, number, group and rank, for messages.
        result: the tensors that its future holds in the end.
    """

    def __init__(self, label: str, result: object) -> None:
        super().__init__()
        self._label, self._result = label, result
        self.over = threading.Event()
        self._error: BaseException | None = None
        self._futures: tuple[Future, Future] | None = None
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the verb is over; its results may be read from then on. Local.

        Args:
            timeout: how long to wait; None or zero waits as long as the verb itself may take,
                which its group's timeout limits.

        Raises:
            CollectiveTimeout: it is not over by then; the verb itself goes on.
            LockstepError: what made the verb fail.
        """
        seconds = timeout.total_seconds() if timeout is not None else 0.0
        if not self.over.wait(seconds if seconds > 0 else None):
            raise CollectiveTimeout(
                f"{self._label} is not over after the {seconds:g} s that wait() was given",
                needed="all ranks of the group reach this verb",
                cure="look at what the other ranks do; wait longer, or without a timeout",
            )
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Say whether the verb is over, well or not. Local."""
        return self.over.is_set()

    def failure(self) -> BaseException | None:
        """Return what made the verb fail, None if nothing has so far. Local."""
        return self._error

    def get_future(self) -> Future:
        """Return a future that holds the result when the verb is over. Local."""
        asked.work = self
        with self._lock:
            new, self._futures = self._futures is None, self._futures or later(self._outcome)
            switch, future = self._futures
            late = new and self.over.is_set()
        if late:
            switch.set_result(None)
        return future

    def finish(self, error: BaseException | None = None) -> None:
        """Wake everybody who waits. Called once, by whoever carried out the verb. Local."""
        with self._lock:
            self._error = error
            self.over.set()
            futures = self._futures
        if futures is not None:
            futures[0].set_result(None)

    def _outcome(self) -> object:
        if self._error is not None:
            raise self._error
        return self._result


class Together(_Work):
    """Several Works that are waited for as one.

    Args:
        works: in the order of their issue.
    """

    def __init__(self, works: Sequence[Finished | Pending]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for all of them, each for as long as the timeout says. Local."""
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        """Say whether all of them are over. Local."""
        return all(work.is_completed() for work in self._works)

    def failure(self) -> BaseException | None:
        """Return the first failure among them. Local."""
        return next((f for work in self._works if (f := work.failure()) is not None), None)

    def get_future(self) -> Future:
        """Return a future that is done when all of theirs are. Local."""
        asked.work = self
        return torch.futures.collect_all([work.get_future() for work in self._works])


FINISHED = Finished()
