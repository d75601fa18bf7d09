"""One thread that writes while training goes on. All Local."""

from __future__ import annotations

import threading
from collections.abc import Callable

from lockstep.errors import CheckpointError, LockstepError


class Writer:
    """Runs one job at a time in the background, and keeps its failure until it is asked for."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: LockstepError | None = None

    @property
    def failed(self) -> bool:
        """Whether the last job has failed so far and nobody has been told yet."""
        return self._failure is not None

    def start(self, job: Callable[[], object]) -> None:
        """Start a job; the one before has to have ended, see `wait`."""

        def run() -> None:
            try:
                job()
            except LockstepError as error:
                self._failure = error
            except Exception as error:  # it must reach the training, whatever it is
                self._failure = CheckpointError(
                    f"the checkpoint cannot be written: {type(error).__name__}: {error}",
                    cure="the older checkpoints are as they were",
                )

        # A daemon: a rank that fails ends at once, and leaves a file under a name of its own.
        self._thread = threading.Thread(target=run, name="lockstep-checkpoint", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> None:
        """Wait for the job to end.

        Raises:
            LockstepError: its failure, once; or it has not ended within the seconds.
        """
        if self._thread is not None:
            self._thread.join(seconds)
            if self._thread.is_alive():
                raise CheckpointError(
                    f"the last checkpoint is not written after {seconds:g} s",
                    needed="a disk that is faster than the checkpoints come",
                    cure="save less often, wait longer (--timeout), or look at the file system "
                    "(`df`, `dmesg`)",
                )
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
