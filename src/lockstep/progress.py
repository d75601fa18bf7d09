"""How far a training is: a bar where somebody looks at a terminal, plain lines where not. Local."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from typing import Any


class Progress:
    """Prints lines; on a terminal with a bar below them for the steps of the epoch.

    Args:
        active: whether this rank prints at all.
        width: columns of the terminal; 0 for plain lines; None to find out.
    """

    def __init__(self, active: bool, width: int | None = None) -> None:
        self._active, self._bar, self._task = active, None, None
        columns = (terminal_width() if width is None else width) if active else 0
        if columns > 0:
            self._bar = _bar(columns)

    @property
    def has_bar(self) -> bool:
        """Whether there is a bar."""
        return self._bar is not None

    def say(self, text: str) -> None:
        """Print a text, above the bar if there is one."""
        if not self._active:
            return
        if self._bar is None:
            print(text, flush=True)
        else:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def start(self, epoch: int, epochs: int, steps: int, done: int = 0) -> None:
        """Begin the bar of an epoch.

        Args:
            epoch, epochs: number of the epoch, from 1, and of all.
            steps: of the epoch.
            done: steps of it that were done before a restart.
        """
        if self._bar is None:
            return
        self.stop()
        self._bar = _bar(self._bar.console.width)
        self._task = self._bar.add_task(f"epoch {epoch}/{epochs}", total=steps, completed=done)
        self._bar.start()

    def step(self, done: int) -> None:
        """Move the bar on to so many steps of the epoch."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done)

    def stop(self) -> None:
        """End the bar; a second call does nothing."""
        if self._bar is not None:
            self._bar.stop()


def _bar(columns: int) -> Any:
    from rich import progress
    from rich.console import Console

    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(bar_width=None),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
        console=Console(file=sys.stdout, width=columns, force_terminal=True),
        # what else is printed goes its own way, as in a log
        redirect_stdout=False,
        redirect_stderr=False,
        refresh_per_second=4,
    )


def terminal_width() -> int:
    """Return the columns of the terminal at which somebody looks, 0 if there is none.

    Open MPI gives each rank a terminal of its own, also where its output goes into a file. That one
    has no size; then the launcher's own output tells.
    """
    if not _is_terminal(1) or os.environ.get("TERM", "dumb") == "dumb":
        return 0
    if own := _columns(1):
        return own
    path = f"/proc/{os.getppid()}/fd/1"
    with contextlib.suppress(OSError):
        if not stat.S_ISCHR(os.stat(path).st_mode):
            return 0
        handle = os.open(path, os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK)
        try:
            return _columns(handle) if os.isatty(handle) else 0
        finally:
            os.close(handle)
    return 0


def _is_terminal(handle: int) -> bool:
    try:
        return os.isatty(handle) and sys.stdout.isatty()
    except ValueError:  # a stream that is closed
        return False


def _columns(handle: int) -> int:
    try:
        return os.get_terminal_size(handle).columns
    except OSError:
        return 0
