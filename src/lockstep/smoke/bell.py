"""Hear of SIGTERM in any thread, even while the main one is stuck in C."""

from __future__ import annotations

import contextlib
import os
import signal


class Bell:
    """Rings when the launcher sends SIGTERM. Made by the main thread.

    Python's own handler runs in the main thread, and only between two lines of Python. But the part
    of it that is written in C runs at once, and writes the number of the signal into a pipe.
    """

    def __init__(self) -> None:
        self._read, write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(write, False)
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def rings(self) -> bool:
        """Say whether SIGTERM has come since the last look. Local."""
        with contextlib.suppress(BlockingIOError):
            return signal.SIGTERM in os.read(self._read, 64)
        return False
