"""The directory of a run, new or kept over restarts. The root writes it."""

from __future__ import annotations

import csv
import io
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lockstep import files, notes
from lockstep.errors import LockstepError
from lockstep.lock import DirectoryLock
from lockstep.metrics import opening, records
from lockstep.metrics.curves import draw
from lockstep.metrics.events import TENSORBOARD, Events
from lockstep.metrics.opening import CURVES, DONE, METRICS, RESULTS
from lockstep.metrics.records import EPOCH, START, STEP, Appender, Record
from lockstep.metrics.surroundings import surroundings
from lockstep.together import LIMIT, on_all, on_root
from lockstep.world import World


class RunDirectory:
    """The directory of this run: `PARENT/NAME-TIME`, a new one; or exactly the one that is named.

    It holds settings.json (of a restart: settings-2.json and so on); metrics.jsonl, a line a
    record, the system's when it is recorded; results.csv, a row an epoch, made anew after each;
    curves.png; and DONE, written last, by a run that has come to its end. One that is named is kept
    over restarts, and one job at a time uses it.

    Making it, `check`, `finish` and `leave` are Collective, the rest is Local.

    Args:
        world: the ranks; on all but the root the Local methods do nothing.
        parent: where to make a new one; made too if it is missing.
        name: of the job.
        settings: a dataclass.
        facts: what else belongs into settings.json.
        exact: the directory itself, in place of parent and name.
        tensorboard: write TensorBoard events too.
        timeout: seconds to wait for the other ranks once it is made, and for the disk.

    Attributes:
        path: the directory, the same on all ranks.

    Raises:
        SettingsError: on all ranks: the root cannot make it; a run is done in it; files lie in it
            that no run has made; tensorboard is missing.
        StorageError: on all ranks: it cannot be written to, or another job uses it.
    """

    def __init__(
        self,
        world: World,
        parent: Path,
        name: str,
        settings: Any,
        facts: Mapping[str, Any],
        *,
        exact: Path | None = None,
        tensorboard: bool = False,
        timeout: float = LIMIT,
    ) -> None:
        self._world, self._root, self._timeout = world, world.rank == 0, timeout
        self._start = time.perf_counter()
        self._failure: LockstepError | None = None
        self._file: Appender | None = None
        self._events: Events | None = None
        self._lock: DirectoryLock | None = None
        # records of an earlier start, of which nobody has said yet that the run goes on after them
        self._again = False

        def place() -> Path | None:
            if self._root and exact is not None:
                self._lock = opening.take(exact)
            return opening.make(parent, name) if self._root and exact is None else exact

        placed = on_all(world, place, "open the run directory")
        self.path: Path = world.comm.bcast(placed, root=0)
        notes.directory = str(self.path)
        hosts = world.comm.gather(world.host, root=0) or []

        def note() -> None:
            if tensorboard:
                self._events = Events(self.path)
            noted = {"settings": asdict(settings), **facts, **surroundings(world, hosts)}
            opening.note_settings(self.path, noted)
            self._again = _is_there(self.path / METRICS)

        on_root(world, note, "note the settings")

    @staticmethod
    def is_done(world: World, exact: Path) -> bool:
        """Say whether a run has come to its end in a directory. Collective."""
        found: bool = world.comm.bcast(
            on_all(world, lambda: not world.rank and _exists(exact / DONE), "look for DONE"), root=0
        )
        return found

    def resumed(self, global_step: int) -> None:
        """Say that the run goes on after a step; what was recorded of later ones is superseded.

        Without this, a restart in a directory that has records supersedes all of them.
        """
        if self._root:
            self._again = False
            self._write({"kind": START, "global_step": global_step})
            if (events := self._events) is not None:
                self._attempt(lambda: events.start(global_step), TENSORBOARD)

    def record(self, kind: str, **values: Any) -> None:
        """Write down what was measured.

        A failure is printed, and raised on all ranks by `check`, `finish` or `leave`.

        Args:
            kind: what it is, such as "step"; values of the kind "epoch" go to results.csv too.
            values: numbers and texts, with the unit in the name where there is one; global_step,
                the number of steps done, makes a restart supersede it and TensorBoard show it.
        """
        if not self._root:
            return
        if self._again:
            self.resumed(0)
        self._write({"kind": kind, **values})
        if kind == EPOCH:
            self._attempt(self._results, RESULTS)

    def check(self) -> None:
        """Raise on all ranks what has failed on the root. Collective."""
        on_root(self._world, self._raise, "look at the run directory", self._timeout)

    def finish(self) -> None:
        """Write results.csv, curves.png, and DONE, the last of all. Collective.

        Raises:
            StorageError: on all ranks: something could not be written; then DONE is not there.
        """
        self._end(done=True)

    def leave(self) -> None:
        """Write what `finish` does, but not DONE: the run is to go on later. Collective."""
        self._end(done=False)

    def _end(self, done: bool) -> None:
        on_root(self._world, self._conclude, "write the run directory", self._timeout)
        if done:
            on_root(self._world, self._mark, "write DONE", self._timeout)
        if self._lock is not None:
            self._lock.release()

    def _conclude(self) -> None:
        self._raise()
        self._attempt(self._results, RESULTS)
        self._attempt(self._curves, CURVES)
        if self._events is not None:
            self._attempt(self._events.close, TENSORBOARD)
        if self._file is not None:
            self._attempt(self._file.close, METRICS)
        self._raise()

    def _mark(self) -> None:
        text = json.dumps({"done": time.strftime("%Y-%m-%dT%H:%M:%S%z")}) + "\n"
        self._attempt(lambda: files.write_text(self.path / DONE, text), DONE)
        self._raise()

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _write(self, record: Record) -> None:
        seconds = round(time.perf_counter() - self._start, 4)
        when = {"time": round(time.time(), 3), "at_seconds": seconds}
        whole = {"kind": record["kind"], **when, **record}

        def write() -> None:
            if self._file is None:
                self._file = Appender(self.path / METRICS)
            self._file.append(whole)

        self._attempt(write, METRICS)
        if (events := self._events) is not None:
            self._attempt(lambda: events.add(whole), TENSORBOARD)

    def _attempt(self, write: Callable[[], None], name: str) -> None:
        """Write; after a failure nothing is written any more."""
        if self._failure is not None:
            return
        try:
            write()
        except OSError as error:
            self._failure = files.failure(error, "write", self.path / name)
            print(self._failure, file=sys.stderr, flush=True)

    def _results(self) -> None:
        rows = records.epochs(records.current(records.read(self.path / METRICS)))
        if not rows:
            return
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)
        files.write_text(self.path / RESULTS, text.getvalue())

    def _curves(self) -> None:
        valid = records.current(records.read(self.path / METRICS))
        steps = [it for it in valid if it["kind"] == STEP]
        rows = records.epochs(valid)
        if rows or any("global_step" in it for it in steps):
            with files.fresh(self.path / CURVES, 0o666) as file:
                draw(rows, file, steps)


def done_already(world: World, exact: Path | None, longer: str = "") -> bool:
    """Say whether the run that was named has come to its end; if so the root prints what to do.

    Collective. A job asks it before anything else, and returns 0: what it was to do is done.

    Args:
        world: the ranks.
        exact: the directory that was named; None if none was.
        longer: how to go on with the run all the same, if it can be done.

    Raises:
        StorageError: on all ranks: the root may not look there.
    """
    if exact is None or not RunDirectory.is_done(world, exact):
        return False
    if world.rank == 0:
        more = f"To train longer, remove {exact / DONE} and {longer}. " if longer else ""
        print(f"The run in {exact} is DONE. {more}For a new run, name another --run.", flush=True)
    return True


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:
        raise files.failure(error, "look for", path) from error


def _is_there(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0
