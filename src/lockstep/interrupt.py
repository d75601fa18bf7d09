"""Leave a training early, together: a signal on any rank, or a file, stops all at the same step.

A signal handler of Python runs in the main thread between two of its instructions, never inside of
MPI or torch. Ours only takes a note; at the end of each step the ranks compare their notes.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import numpy as np

from lockstep import notes
from lockstep.ending import SETTLE, within
from lockstep.errors import CollectiveTimeout
from lockstep.waiting import wait_until
from lockstep.world import World

# What a job's main returns if it was asked to leave before its end: start it again.
LEFT_EARLY = 85
# NCCL may take USR1 for itself.
SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
STOP = "STOP"
# Seconds between two looks for the file: each is a request to a file server.
_LOOK = 1.0
_STOP, _SAVE = 1, 2


@dataclass(frozen=True)
class Decision:
    """What all ranks do now: stop, and save first; or save and go on."""

    stop: bool
    save: bool


class Interrupts:
    """Catches USR1, USR2 and TERM, and looks for a file, for as long as its ``with`` lasts.

    A second signal changes nothing. The old handlers are restored at the end; but once all ranks
    have agreed to stop, the three signals are ignored from then on, so that another one does not
    kill a process that is leaving with its checkpoint saved.

    Args:
        world: the ranks.
        run_directory: where a file STOP says the same as a signal, whatever the launcher does
            with signals; it is removed once it is obeyed. The root looks for it. None for no file.
        timeout: seconds to wait for the other ranks at the end of a step.
    """

    def __init__(self, world: World, run_directory: Path | None, timeout: float) -> None:
        self._world, self._timeout = world, timeout
        self._file = None if run_directory is None or world.rank else run_directory / STOP
        self._looked = -_LOOK
        self._asked = ""
        self._stopped = False
        self._old: dict[signal.Signals, Any] = {}
        self._mine, self._all = np.zeros(1, np.int32), np.zeros(1, np.int32)

    def __enter__(self) -> Self:
        for number in SIGNALS:
            # None: somebody has put a handler there from C, which Python could not restore
            if signal.getsignal(number) is not None:
                self._old[number] = signal.signal(number, self._note)
                # system calls of other libraries go on as if nothing had been
                signal.siginterrupt(number, False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        for number, handler in self._old.items():
            signal.signal(number, signal.SIG_IGN if self._stopped else handler)
        self._old.clear()

    def _note(self, number: int, _: FrameType | None) -> None:
        self._asked = self._asked or signal.Signals(number).name

    def agree(self, *, save_due: bool = False) -> Decision:
        """Decide together, at the end of a step. Collective, with a limit.

        Args:
            save_due: this rank finds that a checkpoint is due; one rank is enough.

        Returns:
            the same on all ranks.

        Raises:
            CollectiveTimeout: a rank did not come.
        """
        from mpi4py import MPI

        self._look_for_file()
        self._mine[0] = (_STOP if self._asked else 0) | (_SAVE if save_due else 0)
        request = self._world.comm.Iallreduce(self._mine, self._all, MPI.BOR)
        with notes.during("world", "the end of a step", self._timeout):
            come = wait_until(request.Test, self._timeout)
            if not come:
                notes.explain()  # before the call is over
        if not come:
            raise CollectiveTimeout(
                f"{self._world} waited {self._timeout:g} s for the others at the end of a step",
                needed="every rank comes to the end of the same step",
                cure="look at what the other ranks print or do; --timeout waits longer",
            )
        found = int(self._all[0])
        if found & _STOP and not self._stopped:
            self._stop()
        return Decision(stop=bool(found & _STOP), save=bool(found & (_SAVE | _STOP)))

    def _look_for_file(self) -> None:
        now = time.monotonic()
        if self._file is None or self._asked or now - self._looked < _LOOK:
            return
        self._looked = now
        # a file server that is away for a moment must not end the training
        with contextlib.suppress(OSError):
            if self._file.exists():
                self._asked = str(self._file)

    def _stop(self) -> None:
        """Say who was asked by what, and do away with the file, which is obeyed. Collective."""
        self._stopped = True
        with within(self._timeout + SETTLE, "telling why to stop"):
            everyone = self._world.comm.gather(self._asked, root=0)
        for rank, asked in enumerate(everyone or []):
            if asked:
                print(f"asked to leave by {asked} on rank {rank}", flush=True)
                break
        if self._file is not None:
            try:
                with contextlib.suppress(FileNotFoundError):
                    self._file.unlink()
            except OSError as error:
                print(f"remove {self._file}: {error.strerror}", file=sys.stderr, flush=True)
