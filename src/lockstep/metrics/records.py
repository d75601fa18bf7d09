"""metrics.jsonl: a line a record, appended over all restarts of a run. Everything here is Local.

A run that is killed and goes on from a checkpoint measures some steps twice. Nothing is taken out
of the file; a record "start" says after which step it went on, and `current` leaves out what that
supersedes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

START, STEP, EPOCH = "start", "step", "epoch"

Record = dict[str, Any]


class Appender:
    """The file, open for more records. A line that a kill has cut off stays as it is, alone.

    Raises:
        OSError: it cannot be written to.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._handle = os.open(path, flags, 0o666)
        self.size = os.fstat(self._handle).st_size
        if self.size and os.pread(self._handle, 1, self.size - 1) != b"\n":
            self._write(b"\n")

    def append(self, record: Record) -> None:
        """Write a record; it is the system's when this returns, and outlives the process."""
        self._write(json.dumps(record).encode() + b"\n")

    def close(self) -> None:
        """Wait until all is on disk."""
        if self._handle >= 0:
            try:
                os.fsync(self._handle)
            finally:
                os.close(self._handle)
                self._handle = -1

    def _write(self, data: bytes) -> None:
        # A disk that is nearly full takes a part first, then refuses the rest.
        while data:
            data = data[os.write(self._handle, data) :]


def read(path: Path) -> list[Record]:
    """Return all records of a file, none if it is missing; what is no record is left out.

    Raises:
        OSError: it cannot be read.
    """
    if not path.exists():
        return []
    found = []
    for line in path.read_bytes().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and "kind" in record:
            found.append(record)
    return found


def current(records: Iterable[Record]) -> list[Record]:
    """Return the records that count: without the steps and epochs that were done again later.

    Args:
        records: in the order of the file. A "start" supersedes what is of a later step than its
            global_step, among "step" and "epoch"; all of these if its global_step is 0.
    """
    valid: list[Record] = []
    for record in records:
        if record["kind"] == START:
            last = record.get("global_step", 0)
            valid = [it for it in valid if not _is_after(it, last)]
        valid.append(record)
    return valid


def _is_after(record: Record, last: int) -> bool:
    return record["kind"] in (STEP, EPOCH) and record.get("global_step", 1) > last


def epochs(records: Sequence[Record]) -> list[Record]:
    """Return a row an epoch, in order; of several records of one epoch the last.

    Args:
        records: those that count.

    Returns:
        what was measured, without the kind and the time of the record.
    """
    rows = {it["epoch"]: it for it in records if it["kind"] == EPOCH}
    own = ("kind", "time", "at_seconds", "global_step")
    return [
        {name: value for name, value in rows[epoch].items() if name not in own}
        for epoch in sorted(rows)
    ]
