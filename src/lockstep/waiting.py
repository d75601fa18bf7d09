"""Wait for MPI without burning the core that the awaited rank may need.

MPI offers no wait that sleeps and none with a limit, so a wait here is a loop over ``Test``. It
spins first, for the case that the answer is microseconds away; then it gives the core away between
two looks; at last it pauses for a small part of the time it has waited already. The pauses save
power and another rank's time; nothing relies on their length. Because the loop runs in Python,
Ctrl-C and other signals are handled while waiting. Everything here is Local.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Patience:
    """How a wait goes from eager to lazy.

    Attributes:
        spins: looks without giving the core away.
        eager: seconds of giving the core away between looks, before the first pause.
        share: length of a pause as a share of the time waited so far.
        longest: longest pause in seconds.
    """

    spins: int
    eager: float
    share: float
    longest: float


# A thread that a caller waits in: latency counts, and a pause may cost 1 % at the most.
FOREGROUND = Patience(spins=64, eager=0.05, share=0.01, longest=1e-3)
# A thread beside the one that computes: each look takes time from the computation.
BACKGROUND = Patience(spins=4, eager=50e-6, share=0.05, longest=1e-3)


# A thread beside the one that computes, whose looks keep a network busy.
COURIER = Patience(spins=4, eager=200e-6, share=0.05, longest=100e-6)
_own = threading.local()
_main = threading.main_thread()


def patience_here() -> Patience:
    """Return how eager a wait in this thread may be: only the main thread has a core of its own."""
    told: Patience | None = getattr(_own, "patience", None)
    if told is not None:
        return told
    # the same as to compare the threads' objects, in a quarter of the time
    return FOREGROUND if threading.get_ident() == _main.ident else BACKGROUND


@contextmanager
def patience(how: Patience) -> Iterator[None]:
    """Let the waits of this thread be as eager as told, inside of the ``with``. Local."""
    before, _own.patience = getattr(_own, "patience", None), how
    try:
        yield
    finally:
        _own.patience = before


def wait_until(ready: Callable[[], bool], seconds: float, patience: Patience = FOREGROUND) -> bool:
    """Call ready until it returns True or the seconds are over. Local.

    Args:
        ready: the question, such as ``request.Test``.
        seconds: the limit; the question is asked at least once.
        patience: how eager the wait is.

    Returns:
        True if the answer came, False if the time ran out.
    """
    for _ in range(patience.spins):
        if ready():
            return True
    start = time.monotonic()
    while True:
        if ready():
            return True
        waited = time.monotonic() - start
        if waited > seconds:
            return False
        if waited < patience.eager:
            os.sched_yield()
        else:
            time.sleep(min(waited * patience.share, patience.longest))
