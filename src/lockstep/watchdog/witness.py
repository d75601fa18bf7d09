"""A small process beside the ranks of a node, which outlives them and says who went first."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lockstep.notes import HEADER, TEXTS
from lockstep.watchdog import life

# Seconds; it does nothing but wait, and so ends at once.
_END = 5.0


@contextmanager
def present(segment: Any, host: str, ranks: Sequence[int]) -> Iterator[None]:
    """Have a witness for the length of a ``with``. Local; on the rank that kept the descriptor.

    Args:
        segment: the notes of the node, a shared_memory.Segment; its descriptor is closed.
        host: name of this host.
        ranks: of the node, in the order of the segment.
    """
    process, descriptor = None, segment.descriptor
    if descriptor >= 0:
        layout = [str(segment.each), str(HEADER), str(TEXTS)]
        where = [str(descriptor), *layout, host, ",".join(map(str, ranks))]
        # Without it the watchers still tell, if the launcher lets them live long enough.
        with contextlib.suppress(OSError):
            process = subprocess.Popen(
                # -I -S: whatever is installed or set here, it starts in milliseconds
                [sys.executable, "-I", "-S", life.__file__, *where],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[descriptor],
                # a signal to the ranks' process group is not for it
                start_new_session=True,
            )
        os.close(descriptor)
    yield
    # Not after an exception: then it sees to it that the launcher ends.
    if process is not None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END)
