"""Wait for the ranks of the node before the end of MPI.

MPI_Finalize waits for all ranks, in C and without a limit. That is right as long as they work. For
one that is stopped it would be for ever; so the ranks of a node look at each other first.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lockstep import notes
from lockstep.ending import LONGEST, abort
from lockstep.ranges import listed
from lockstep.waiting import BACKGROUND, wait_until
from lockstep.watchdog.life import Life

if TYPE_CHECKING:
    from lockstep.shared_memory import Segment
    from lockstep.watchdog.limits import Limits

# Seconds between two looks whether a process is stopped.
_LOOK = 0.25
# Seconds that the first rank that waits has for its words, before the next one would say them.
_AFTER = 3.0


class Farewell:
    """What a rank does last. Local; as a call it waits for the ranks of the node that still work.

    Args:
        segment: the notes of the ranks of the node.
        ranks: their ranks in the world, in the order of the segment.
        host: name of this host.
        limits: after `longest` a rank that is stopped is given up, and the job is ended; after
            `warn` those that still work are told of, once.
    """

    def __init__(self, segment: Segment, ranks: Sequence[int], host: str, limits: Limits) -> None:
        self._segment, self._ranks, self._host = segment, ranks, host
        self._seconds, self._warn, self._tell_at = limits.longest, limits.warn, LONGEST
        self._parts = [segment.part(r) for r in range(segment.size)]
        self._lives: dict[int, Life] = {}
        self._stopped: dict[int, float] = {}  # since when, by the number on the node
        self._next_look = 0.0

    def __call__(self) -> None:
        """Wait; end the job if one of them is stopped for too long."""
        notes.write_word(self._parts[self._segment.rank], notes.ENDED, 1)
        for number, part in enumerate(self._parts):
            if number != self._segment.rank:
                self._lives[number] = Life(notes.read_word(part, notes.PID))
        self._tell_at = time.monotonic() + self._warn
        wait_until(self._all_have_come, LONGEST, BACKGROUND)
        for life in self._lives.values():
            life.close()

    def _all_have_come(self) -> bool:
        missing = [number for number in self._lives if not self._has_come(number)]
        now = time.monotonic()
        if not missing or now < self._next_look:
            return not missing
        self._next_look = now + _LOOK
        for number in missing:
            if not self._lives[number].stopped:
                self._stopped.pop(number, None)
            elif now - self._stopped.setdefault(number, now) > self._seconds + self._turn():
                self._end(number)
        if now > self._tell_at and not self._turn():
            self._tell_at = now + LONGEST
            mine, who = self._ranks[self._segment.rank], [self._ranks[n] for n in missing]
            sys.stderr.write(
                f"lockstep: rank {mine} is at the end of its program and waits for rank "
                f"{listed(who)} ({self._host}) since {self._warn:g} s\n"
            )
        return all(self._lives[number].gone for number in missing)

    def _has_come(self, number: int) -> bool:
        return bool(notes.read_word(self._parts[number], notes.ENDED))

    def _turn(self) -> float:
        """Return how much later than the first rank that waits this one speaks, in seconds."""
        return 0.0 if not any(map(self._has_come, range(self._segment.rank))) else _AFTER

    def _end(self, number: int) -> None:
        sys.stderr.write(
            f"lockstep: rank {self._ranks[number]} ({self._host}) is stopped (SIGSTOP, Ctrl-Z or a "
            f"debugger) since {self._seconds:g} s, and others wait for it at the end of their "
            "program\n"
            "  needed: every rank ends its program\n"
            f"  to do:  kill -CONT {self._lives[number].pid} in time; the job is ended\n"
        )
        abort(1)
