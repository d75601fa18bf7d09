"""The root's side: asks every node what its ranks are doing, and prints one verdict."""

from __future__ import annotations

import contextlib
import hmac
import os
import re
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.watchdog.channel import SEND, Channel
from lockstep.watchdog.printing import head, lines_of, main_stack, say, table
from lockstep.watchdog.report import RankReport, is_over
from lockstep.watchdog.verdict import Verdict, judge, last_calls
from lockstep.watchdog.words import waits_in

# Seconds that a node may take to tell what its ranks do; and to fetch their stacks.
_ANSWER, _FETCH = 2.0, 2.0
_CRASH = 1.0
# After so long a sleep this process was stopped, and the nodes have spoken for themselves; what
# they asked meanwhile is read, and dropped, for so long.
_ASLEEP, _GET_UP = 3.0, 1.0
# The same cause makes several ranks call at almost the same time.
SAME = 8.0
# So long after a rank has left, nobody should wait for it any more.
_SETTLED = 1.0
# Reasons to speak for which the job goes on.
HARMLESS = ("warn", "quit")


@dataclass(frozen=True)
class Ranks:
    """Where the ranks are: for each rank its host and its node."""

    hosts: Sequence[str]
    nodes: Sequence[int]


class Hub:
    """Listens to the watchers of all nodes, in a thread of its own on the root.

    Args:
        listener: a listening socket.
        token: what a watcher has to say first.
        ranks: where they are.
        directory: where the stacks go; "" if there is no such place. Asked when it is needed.
    """

    def __init__(
        self, listener: socket.socket, token: str, ranks: Ranks, directory: Callable[[], str]
    ) -> None:
        self._listener, self._token, self._ranks = listener, token, ranks
        self._directory = directory
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._nodes: dict[Channel, int] = {}
        self._inbox: list[dict[str, Any]] = []
        self._said: dict[str, float] = {}
        # who was blamed lately, and when that was, since the job cannot go on
        self._blamed: tuple[frozenset[int], float] = frozenset(), -SAME
        # the last word of ranks whose watchers have said goodbye
        self._final: dict[int, RankReport] = {}
        self._parted: set[int] = set()
        self._check_at = 0.0
        self._stop = threading.Event()
        self._woken, self._wake = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="lockstep-hub", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening. Local."""
        self._stop.set()
        self._wake.send(b"\0")
        self._thread.join(2 * SEND)
        things: list[Any] = [*self._nodes, self._listener, self._wake, self._woken]
        for thing in things:
            thing.close()

    def _run(self) -> None:
        try:
            self._serve()
        finally:
            # If this has failed, the watchers of the nodes have to know, to speak for themselves.
            for channel in self._nodes if not self._stop.is_set() else ():
                channel.close()

    def _serve(self) -> None:
        awake_at = 0.0
        while not self._stop.is_set():
            before = time.monotonic()
            self._listen(0.5)
            calls = self._take("call")
            self._inbox.clear()
            now = time.monotonic()
            if now - before > _ASLEEP:
                awake_at = now + _GET_UP
            if now < awake_at:
                continue
            for call in calls:
                self._speak(str(call["call"]), call)
            if calls:
                harmless = all(call["call"] in HARMLESS for call in calls)
                self._tell({"told": sorted(self._lately()), "harmless": harmless})
            if self._check_at and time.monotonic() > self._check_at:
                self._check_at = 0.0
                self._speak("left", {})

    def _speak(self, reason: str, call: dict[str, Any]) -> None:
        reports = self._gather(is_sudden(reason))
        if reason == "failed" and not (any(map(_tells, reports)) or last_calls(reports)[0]):
            # A peer that has crashed, as gloo does over another size, takes a moment to be gone.
            self._until(lambda: False, _CRASH)
            reports = self._gather(True)
        told = self._lately() if reason != "quit" else frozenset()
        if self._stop.is_set() or (reason == "warn" and is_over(call, reports)):
            return
        verdict = judge(reports, call.get("rank") if reason == "failed" else None, told)
        if reason == "left" and not (verdict.fatal and any(it.open for it in reports)):
            return  # they have left, and nobody waits for them
        if reason == "quit" or not self._is_said(reason, call, verdict):
            self._print(reason, call, reports, verdict)
        if verdict.fatal and reason != "quit":
            self._tell({"fatal": True})

    def _print(
        self, reason: str, call: dict[str, Any], reports: Sequence[RankReport], verdict: Verdict
    ) -> None:
        lines = [f"lockstep: {head(reason, call)}"] + [f"  {it}" for it in lines_of(verdict.text)]
        if verdict.late and (written := self._write_stacks(verdict.late)):
            lines.append(f"  stacks: {written}")
        if reason == "quit":
            lines += [f"  {it}" for it in table(reports)]
        say("\n".join(lines))

    def _lately(self) -> frozenset[int]:
        """Return who was blamed a moment ago."""
        return self._blamed[0] if time.monotonic() - self._blamed[1] < SAME else frozenset()

    def _is_said(self, reason: str, call: dict[str, Any], verdict: Verdict) -> bool:
        """Say whether as much was printed a moment ago: several ranks find it at a time."""
        key = f"{reason in HARMLESS} {re.sub('[0-9]+ s', '', verdict.text)}"
        if reason == "warn":
            key = f"{call.get('what')} of {call.get('group')}"
        now = time.monotonic()
        said, self._said[key] = now - self._said.get(key, -SAME) < SAME, now
        before = self._lately()
        if before and verdict.blamed <= before:
            return True  # whatever has become of the others since then is a consequence
        if reason == "left" and not verdict.blamed:
            return True  # they have left with an error that says why
        if reason not in HARMLESS:
            self._blamed = verdict.blamed, now
        return said

    def _gather(self, now: bool) -> list[RankReport]:
        """Return what is known of every rank, in rank order; now: where it is this moment."""
        known = dict(self._final)
        self._tell({"report": now})

        def enough() -> bool:
            for message in self._take("reports"):
                for values in message["reports"]:
                    known[values["rank"]] = RankReport.of_json(values)
            return len(known) == len(self._ranks.hosts)

        self._until(enough, _ANSWER)
        hosts = enumerate(self._ranks.hosts)
        return [known.get(rank) or RankReport(rank, host, "silent") for rank, host in hosts]

    def _write_stacks(self, late: Sequence[int]) -> str:
        """Fetch the stacks of the late ranks; returns where they are, or the stacks."""
        found: dict[int, str] = {}
        wanted = list(late)[:16]
        self._tell({"fetch": wanted})

        def enough() -> bool:
            for message in self._take("stacks"):
                found.update({int(r): text for r, text in message["stacks"].items()})
            return len(found) == len(wanted)

        self._until(enough, _FETCH)
        found = {rank: text for rank, text in found.items() if text}
        directory = self._directory()
        if not found:
            return ""
        if not directory:
            return "of the late ranks (a job with --run DIR keeps them there)" + "".join(
                f"\n  rank {r}:\n{main_stack(text)}" for r, text in sorted(found.items())
            )
        names = []
        for rank, text in sorted(found.items()):
            path = Path(directory) / f"stacks-rank{rank}.txt"
            with contextlib.suppress(OSError):
                handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
                with os.fdopen(handle, "w") as file:
                    file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} rank {rank}\n{text}\n")
                names.append(str(path))
        return ", ".join(names)

    def _until(self, enough: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not enough() and (left := deadline - time.monotonic()) > 0:
            if self._stop.is_set():
                return
            self._listen(min(left, 0.2))

    def _take(self, kind: str) -> list[dict[str, Any]]:
        taken = [it for it in self._inbox if kind in it]
        self._inbox = [it for it in self._inbox if kind not in it]
        return taken

    def _tell(self, message: dict[str, Any]) -> None:
        for channel in list(self._nodes):
            if not self._stop.is_set():
                channel.send(**message)

    def _listen(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._listener:
                self._welcome()
            if key.fileobj in (self._listener, self._woken):
                continue
            channel = key.fileobj
            assert isinstance(channel, Channel)
            for message in channel.receive():
                if channel not in self._nodes:
                    if not hmac.compare_digest(str(message.get("token")), self._token):
                        channel.open = False
                        break
                    self._nodes[channel] = int(message["node"])
                elif "bye" in message:
                    self._keep(self._nodes[channel], message["bye"])
                else:
                    self._inbox.append(message)
                    if "call" in message:
                        channel.send(heard=True)
            if not channel.open:
                self._selector.unregister(channel)
                channel.close()
                if (node := self._nodes.pop(channel, None)) is not None:
                    self._lose(node)

    def _keep(self, node: int, reports: list[dict[str, Any]]) -> None:
        """Keep the last word of a rank whose program is over; another one parts from a session."""
        for it in map(RankReport.of_json, reports):
            if it.ending:
                self._final[it.rank] = it
            else:
                self._parted.add(node)
        self._check_at = time.monotonic() + _SETTLED

    def _lose(self, node: int) -> None:
        """A watcher is gone. If it was the last of its node, so are the ranks there."""
        if node in self._nodes.values() or node in self._parted:
            return
        for rank, where in enumerate(self._ranks.nodes):
            if where == node and rank not in self._final:
                self._final[rank] = RankReport(rank, self._ranks.hosts[rank], "gone")
        self._check_at = time.monotonic() + _SETTLED

    def _welcome(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            self._selector.register(Channel(connection), selectors.EVENT_READ)


def is_sudden(reason: str) -> bool:
    """Say whether a verdict is given for what has just happened, while ranks are on their way."""
    return reason in ("failed", "gone", "left")


def _tells(it: RankReport) -> bool:
    """Say whether a rank's report may explain why another one's call has failed."""
    call = waits_in(it)
    return it.life != "running" or (call is not None and not call.seen)
