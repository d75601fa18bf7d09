"""Do a piece of work with a limit, even where the work hangs inside of C.

The work is done by the main thread: it is the one whose waits are eager, and the one that signals
reach. The thread that asks for it watches the clock. If the main thread does not come back, later
work is done by threads of its own.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from lockstep.errors import LockstepError
from lockstep.waiting import Patience, wait_until

# The one who waits looks now and then; a check takes tenths of a second.
LAZY = Patience(spins=1, eager=0.0, share=0.05, longest=0.01)
_PACKAGE = str(Path(__file__).parents[1])


@dataclass(frozen=True)
class Answer:
    """What came of a piece of work on one rank.

    Attributes:
        value: what it returned; None unless it came to its end.
        trouble: why it failed, if it did.
        cure: what to do about that.
        hung: where it stands, if it did not end within its limit.
        seconds: how long it took.
    """

    value: Any = None
    trouble: str = ""
    cure: str = ""
    hung: str = ""
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        """Whether there is a value."""
        return not (self.trouble or self.hung)


@dataclass
class _Task:
    work: Callable[[], Any]
    done: threading.Event = field(default_factory=threading.Event)
    thread: int = 0
    answer: Answer = field(default_factory=Answer)

    def run(self) -> None:
        self.thread = threading.get_ident()
        try:
            self.answer = Answer(self.work())
        except LockstepError as error:
            self.answer = Answer(trouble=error.found, cure=error.cure)
        except Exception as error:
            self.answer = Answer(trouble=_told(error), cure="the line of code says where it arose")
        finally:
            self.done.set()


class Hands:
    """The main thread at work, and another one that gives it the work and waits with a limit."""

    def __init__(self) -> None:
        self._todo: SimpleQueue[_Task | None] = SimpleQueue()
        self._last: _Task | None = None
        self.stuck = False

    def serve(self) -> None:
        """Do what is asked for until `stop` is called. Local, for the main thread."""
        while (task := self._todo.get()) is not None:
            task.run()

    def stop(self) -> None:
        """Let `serve` return, once it has nothing to do. Local."""
        self._todo.put(None)

    def do(
        self, work: Callable[[], Any], seconds: float, watch: Callable[[], object] = lambda: None
    ) -> Answer:
        """Have the work done and return what came of it, within the seconds. Local.

        Args:
            work: may raise; may never return.
            seconds: limit.
            watch: called now and then while waiting; may raise.
        """
        task, start = _Task(work), time.monotonic()
        if self._last is None or self._last.done.is_set():
            self._last = task
            self._todo.put(task)
        else:
            threading.Thread(target=task.run, name="lockstep-check", daemon=True).start()

        def ended() -> bool:
            watch()
            return task.done.is_set()

        in_time = wait_until(ended, seconds, LAZY)
        took = time.monotonic() - start
        if not in_time:
            self.stuck = True
            return Answer(hung=_place(task.thread), seconds=took)
        found = task.answer
        return Answer(found.value, found.trouble, found.cure, seconds=took)


def _told(error: BaseException) -> str:
    """Return kind and text of an error, and the last line of our own code that it went through."""
    frames = traceback.extract_tb(error.__traceback__)
    text = " ".join(str(error).split())[:400]
    return f"{type(error).__name__}: {text}{_spelled(frames)}"


def _place(thread: int) -> str:
    """Return where a thread stands, in our own code and in whatever that has called."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "a place that is not known"
    frames = traceback.extract_stack(frame)
    last = frames[-1]
    return f"{Path(last.filename).name}:{last.lineno} ({last.name}){_spelled(frames[:-1])}"


def _spelled(frames: traceback.StackSummary | list[traceback.FrameSummary]) -> str:
    own = [frame for frame in frames if frame.filename.startswith(_PACKAGE)]
    if not own:
        return ""
    last = own[-1]
    return f", from {Path(last.filename).relative_to(_PACKAGE)}:{last.lineno} ({last.name})"
