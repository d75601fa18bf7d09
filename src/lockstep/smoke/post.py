"""Messages between the root and the other ranks that never wait for ever.

They travel on the world's communicator, under tags that nobody else uses, as messages from one rank
to one other: so the root knows who has answered and who has not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from lockstep.mpi_backend.tags import SPLIT
from lockstep.smoke.hands import LAZY
from lockstep.waiting import wait_until
from lockstep.world import World

# The session has taken the tags from SPLIT + 2 to SPLIT + 5.
_COMMAND, _ANSWER = SPLIT + 20, SPLIT + 21


@dataclass(frozen=True)
class Command:
    """What the root wants a rank to do.

    Attributes:
        kind: "run" a check, "look" at processes, or "end".
        number: of the command, for its answer.
        check: which one to run.
        limit: seconds for it.
        pids: processes of this host to look at.
        code: the exit code.
    """

    kind: str
    number: int
    check: int = 0
    limit: float = 0.0
    pids: tuple[int, ...] = ()
    code: int = 0


class Post:
    """The messages of one rank. Everything in it is Local."""

    def __init__(self, world: World) -> None:
        self._comm = world.comm
        self._sent: list[Any] = []

    def command(self, ranks: Iterable[int], command: Command) -> None:
        """Tell ranks what to do; does not wait."""
        self._send(ranks, command, _COMMAND)

    def answer(self, number: int, content: Any) -> None:
        """Tell the root what came of a command; does not wait."""
        self._send([0], (number, content), _ANSWER)

    def await_command(self, seconds: float) -> Command | None:
        """Return the root's next command, None if none came within the seconds."""
        found: list[Command] = []
        wait_until(lambda: self._take(0, _COMMAND, found), seconds, LAZY)
        return found[0] if found else None

    def collect(
        self,
        ranks: Iterable[int],
        number: int,
        seconds: float,
        watch: Callable[[], object] = lambda: None,
    ) -> dict[int, Any]:
        """Return the answers to a command, by rank; those that did not come in time are left out.

        Args:
            ranks: whose answers to wait for.
            number: of the command; answers to earlier ones, which came too late, are dropped.
            seconds: limit.
            watch: called now and then; may raise.
        """
        waiting, answers = set(ranks), {}

        def all_here() -> bool:
            watch()
            for rank in sorted(waiting):
                found: list[tuple[int, Any]] = []
                while self._take(rank, _ANSWER, found):
                    if found[-1][0] == number:
                        answers[rank] = found[-1][1]
                        waiting.discard(rank)
            return not waiting

        wait_until(all_here, seconds, LAZY)
        return answers

    def flush(self, seconds: float) -> bool:
        """Wait until what was sent is on its way; say whether it is."""
        return wait_until(self._all_sent, seconds)

    def _send(self, ranks: Iterable[int], content: Any, tag: int) -> None:
        self._all_sent()
        self._sent += [self._comm.isend(content, rank, tag) for rank in ranks]

    def _all_sent(self) -> bool:
        self._sent = [request for request in self._sent if not request.test()[0]]
        return not self._sent

    def _take(self, rank: int, tag: int, into: list[Any]) -> bool:
        """Put the next message of a rank into the list, if one is there."""
        message = self._comm.improbe(rank, tag)
        if message is None:
            return False
        request, end = message.irecv(), time.monotonic() + 5.0
        while time.monotonic() < end:
            arrived, content = request.test()
            if arrived:
                into.append(content)
                return True
        return False
