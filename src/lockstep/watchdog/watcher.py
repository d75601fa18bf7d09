"""The thread that looks on: at this rank, and on the first two ranks of a node at all of them."""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
import sys
import threading
import time
from dataclasses import replace
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from lockstep import notes
from lockstep.ending import LONGEST, abort
from lockstep.notes import Recorder
from lockstep.watchdog import stacks
from lockstep.watchdog.channel import Channel
from lockstep.watchdog.hooks import Hooks
from lockstep.watchdog.hub import HARMLESS, SAME, Hub, is_sudden
from lockstep.watchdog.life import Life
from lockstep.watchdog.limits import Limits
from lockstep.watchdog.node import Node
from lockstep.watchdog.printing import alone
from lockstep.watchdog.reading import Call, Notes
from lockstep.watchdog.report import facts_of, facts_of_last

if TYPE_CHECKING:
    from lockstep.shared_memory import Segment

# Seconds between two looks.
_TICK = 0.25
# The root has to say within that time that it has heard a call, and then to answer it: it asks all
# nodes for what they know, and for stacks.
_HEARD, _ROOT = 3.0, 8.0
# An orderly end, with an error of its own, has precedence over ours.
_GRACE = 3.0


class Watcher:
    """Looks after the ranks of this node. Local: waits for nobody.

    Args:
        segment: the notes of the ranks of the node.
        ranks: their ranks in the world, in the order of the segment.
        host: name of this host.
        channel: to the root; None on ranks that do not report.
        limits: when to speak.
        hub: on the root.

    Attributes:
        segment, ranks: as given.
        recorder: of this rank.
        hooks: that note calls, if they do not note themselves.
    """

    def __init__(
        self,
        segment: Segment,
        ranks: list[int],
        host: str,
        *,
        channel: Channel | None,
        limits: Limits,
        hub: Hub | None,
    ) -> None:
        self.segment, self.ranks, self._node = segment, ranks, Node(segment, ranks, host)
        self._channel, self._limits, self._hub = channel, limits, hub
        longest = limits.longest if limits.wait else LONGEST
        self.recorder = Recorder(segment.part(segment.rank), longest)
        # what has been said of already: (rank, entered, reason)
        self._said: set[tuple[int, int, str]] = set()
        self.hooks: Hooks | None = None
        self._called: tuple[str, dict[str, Any], float] | None = None
        self._heard = False  # the root knows of it
        # who was blamed, and when that was
        self._told: tuple[frozenset[int], float] = frozenset(), 0.0
        self._end_at = 0.0
        self._main = threading.main_thread().ident or 0
        self._selector = selectors.DefaultSelector()
        self._signals, self._wake = socket.socketpair()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lockstep-watcher", daemon=True)

    def start(self) -> None:
        """Begin to look. The ranks of the node have written their process ids."""
        self.recorder.set(notes.STACKS, stacks.offer())
        self._signals.setblocking(False)
        self._selector.register(self._signals, selectors.EVENT_READ, "signals")
        if self._channel is not None:
            self._selector.register(self._channel, selectors.EVENT_READ, "root")
            self._node.watch()
            for local, life in self._node.lives.items():
                if local != self.segment.rank and life.fileno() >= 0:
                    self._selector.register(life, selectors.EVENT_READ, "life")
        self._thread.start()

    @property
    def wake(self) -> socket.socket:
        """Where the numbers of signals are written to."""
        return self._wake

    def explain(self, seconds: float) -> None:
        """Ask for a verdict, since a call of this rank has failed, and wait for it. Local.

        Args:
            seconds: limit.
        """
        if self._stop.is_set() or threading.current_thread() is self._thread:
            return
        asked = monotonic_ns()
        self.recorder.set(notes.ASKED, asked)
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")
        deadline = time.monotonic() + seconds
        while self.recorder.get(notes.TOLD) < asked and time.monotonic() < deadline:
            if not self._thread.is_alive() or self._stop.wait(0.02):
                return
            if self._channel is None and self._node.is_mute():
                if not self._node.lives:
                    self._node.watch()
                self._speak("failed", facts_of_last(self._node.said(self.segment.rank)))

    def close(self, *, ending: bool) -> None:
        """Stop looking; ending: because the program is over, so that nobody need wait. Local."""
        self._stop.set()
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")
        self._thread.join(2.0)
        if self._channel is not None and self._channel.open:
            mine = self._node.report_of(self.segment.rank)
            mine = replace(mine, ending=ending and bool(mine.left))
            self._channel.send(bye=[mine.as_json()])
        if self._hub is not None:
            self._hub.close()
        self._node.close()
        for thing in (self._channel, self._signals, self._wake):
            if thing is not None:
                thing.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            for key, _ in self._selector.select(_TICK):
                self._attend(key)
            self._note_place()
            if self.recorder.get(notes.SHOW):
                self.recorder.set(notes.SHOW, 0)
                stacks.show()
            if self._channel is None or self._stop.is_set():
                continue
            self._look_round()
            self._look_at_root()
            if self._end_at and time.monotonic() > self._end_at:
                abort(1)

    def _attend(self, key: selectors.SelectorKey) -> None:
        if key.data == "signals":
            with contextlib.suppress(OSError):
                if signal.SIGQUIT in self._signals.recv(64):
                    if self._channel is None:
                        self.recorder.set(notes.ASKED, -monotonic_ns())  # a reporter sees it
                    else:
                        self._call("quit", {})
        elif key.data == "life":
            self._selector.unregister(key.fileobj)
            self._lost(key.fileobj)  # type: ignore[arg-type]
        elif self._channel is not None:
            for message in self._channel.receive():
                self._answer(message)
            if not self._channel.open:
                self._selector.unregister(self._channel)

    def _answer(self, message: dict[str, Any]) -> None:
        assert self._channel is not None
        if "report" in message:
            self._note_place()
            reports = self._node.reports(now=bool(message["report"]))
            self._channel.send(reports=[it.as_json() for it in reports])
        elif "fetch" in message:
            self._channel.send(stacks=self._node.stacks_of(message["fetch"]))
        elif "told" in message:
            self._told = frozenset(message["told"]), time.monotonic()
            if not message["harmless"]:
                self._called = None
                self._node.tell()
            elif self._called is not None and self._called[0] in HARMLESS:
                self._called = None
        elif "heard" in message:
            self._heard = True
        elif "fatal" in message and not self._limits.wait:
            self._end_at = self._end_at or time.monotonic() + _GRACE

    def _note_place(self) -> None:
        # What is not over in a look lasted when the look began: later this thread may have waited
        # for the interpreter.
        moment = monotonic_ns()
        if (hooks := self.hooks) is not None:
            hooks.look()
        self.recorder.beat(sys._current_frames().get(self._main), moment)

    def _look_round(self) -> None:
        """Look whether a call of a rank of this node stands too long, or has failed."""
        now = monotonic_ns()
        for local, said in self._node.look():
            if said.asked:
                self._heed(local, said)
            if said.state not in (notes.RUNNING, notes.CLOSED):
                self._left(local, said)
            for call in said.timed(steps=self._limits.wait):
                age = call.age(now)
                # gloo's calls end by themselves, if they are not to wait
                limited = not call.seen or self._limits.wait
                reason = "limit" if age > call.limit and limited else "warn"
                warn = self._limits.warn if call.group != notes.TRAINING else call.limit
                if age > (min(warn, call.limit) if limited else warn):
                    self._call_once(local, call, reason, age)

    def _heed(self, local: int, said: Notes) -> None:
        notes.write_word(self._node.parts[local], notes.ASKED, 0)
        if said.asked < 0:
            self._call("quit", {})
            return
        self._call("failed", {"rank": self.ranks[local], **facts_of_last(said)})

    def _left(self, local: int, said: Notes) -> None:
        key = (local, said.state, "left")
        if key not in self._said:
            self._said.add(key)
            self._call("left", {"rank": self.ranks[local]})

    def _call_once(self, local: int, call: Call, reason: str, age: float) -> None:
        key = (local, call.entered, reason)
        if key in self._said:
            return
        self._said.add(key)
        self._call(reason, facts_of(call, age))
        if reason == "limit" and call.group != notes.SUMS and not self._limits.wait:
            # what the call itself raises at its limit comes first
            self._end_at = self._end_at or time.monotonic() + _GRACE + _ROOT

    def _lost(self, life: Life) -> None:
        """A rank of this node has ended: if it has not closed its session, the job has to end."""
        local = next(n for n, it in self._node.lives.items() if it is life)
        said = self._node.said(local)
        if said.state == notes.CLOSED:
            return
        self._call("gone", {"rank": self.ranks[local]})
        if not self._limits.wait:
            self._end_at = self._end_at or time.monotonic() + _GRACE

    def _call(self, reason: str, facts: dict[str, Any]) -> None:
        assert self._channel is not None
        if self._called is None:
            self._called, self._heard = (reason, facts, time.monotonic()), False
        elif self._called[0] in HARMLESS:
            self._called = (reason, facts, self._called[2])
        if self._channel.open:
            self._channel.send(call=reason, **facts)

    def _look_at_root(self) -> None:
        """Speak for this node if the root does not."""
        assert self._channel is not None
        if self._called is None:
            return
        reason, facts, since = self._called
        waited = time.monotonic() - since
        patient = self._channel.open and self._node.can_speak(0)
        if patient and waited < (_ROOT if self._heard else _HEARD):
            return
        self._called = None
        # What it has said while this process was stopped, as it may have been until now.
        for message in self._channel.receive():
            self._answer(message)
        if self._node.is_first():
            self._speak(reason, facts)
        if reason not in HARMLESS and not self._limits.wait:
            self._end_at = self._end_at or time.monotonic() + _GRACE

    def _speak(self, reason: str, facts: dict[str, Any]) -> None:
        """Give the verdict of this node."""
        silent = "rank 0, which would speak for all, does not answer; on this node:"
        now = time.monotonic()
        told = self._told[0] if now - self._told[1] < SAME else frozenset()
        parted = self._channel is None or not self._channel.open
        # If the root has spoken, and has ended because of that, there is nothing to add.
        if reason in HARMLESS or not parted or not (told or self._node.gave_up(0)):
            self._note_place()
            now_there = self._node.reports(now=is_sudden(reason))
            blamed = alone(reason, facts, now_there, silent, told)
            if reason not in HARMLESS:
                self._told = told | blamed, now
        if reason not in HARMLESS:
            self._node.tell()
