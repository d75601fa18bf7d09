"""Start processes beside a rank that have nothing to do with MPI."""

from __future__ import annotations

import os
import signal
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

from lockstep.launcher import without_launch

# What a batch system sends to all processes of a job, and Ctrl-C: the rank answers, and ends its
# workers.
_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}


@contextmanager
def apart() -> Iterator[None]:
    """Let processes that are started in the body by "spawn" be no ranks. Local.

    "spawn" runs a new Python. Without more it would run the job's own file again, and with it MPI
    if the file's last line is ``lockstep.run(main)``; it would inherit the variables by which an
    MPI library finds its launcher; and a signal to the whole job would end it before the rank can
    save.
    """
    main, environ = sys.modules["__main__"], dict(os.environ)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        sys.modules["__main__"] = types.ModuleType("__main__")
        for name in environ.keys() - without_launch(environ).keys():
            del os.environ[name]
        # It starts a process of its own, and unblocks signals when it has done so.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        yield
    finally:
        os.environ.update(environ)
        sys.modules["__main__"] = main
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
