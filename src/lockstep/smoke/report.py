"""What the root prints and writes down: a row a check, smoke.json, smoke.html."""

from __future__ import annotations

import dataclasses
import json
import platform
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.metrics import DONE
from lockstep.smoke import page, place, table
from lockstep.smoke.check import ORDER, Check, Finding, Who
from lockstep.smoke.compare import named
from lockstep.world import World


class Report:
    """The findings in order, on the root.

    smoke.json is written anew after every check, so that it tells how far the checks came, however
    the job ends; DONE, with the exit code, is written last of all.

    Args:
        world: for its numbers.
        directory: of the run; None if none could be made: then all is printed only.
        questions: all checks that are to come.
    """

    def __init__(self, world: World, directory: Path | None, questions: list[Check]) -> None:
        self._directory, self._questions = directory, questions
        self._rows: list[dict[str, Any]] = []
        self._findings: list[Finding] = []
        self._start = time.monotonic()
        self._running: Check | None = None
        self._terminal = table.Table(world)
        self._facts = {
            "ranks": world.size,
            "nodes": world.nodes,
            "host": world.host,
            "command": sys.argv,
            "python": platform.python_version(),
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        self._save("running")

    def begin(self, check: Check) -> None:
        """Note which check is on. Local."""
        self._running = check
        self._terminal.begin(check.name)
        self._save("running")

    def add(self, check: Check, finding: Finding, seconds: float) -> None:
        """Note and print what a check has found. Local."""
        row = {
            "name": check.name,
            "question": check.question,
            "verdict": finding.verdict,
            "summary": finding.summary,
            "faults": [dataclasses.asdict(fault) for fault in finding.faults],
            "seconds": round(seconds, 3),
            "details": finding.details,
        }
        self._rows.append(row)
        self._findings.append(finding)
        self._running = None
        self._terminal.add(row)
        self._save("running")

    def close(self, state: str) -> int:
        """Write everything, print the rest, return the exit code: 1 unless all is well. Local."""
        self._save(state)
        self._replace(place.PAGE, page.page(self._record(state), self._findings))
        code = int(self._verdict() in ("failed", "not run"))
        if state == "done":
            self._replace(DONE, f"{code}\n")
        self._terminal.close(self._record(state), self._directory)
        return code

    def ended(self, dead: Mapping[int, str], roster: Mapping[int, Who]) -> None:
        """Write down that the launcher has ended the job, and who was dead by then. Local."""
        finding = Finding("the launcher has ended the job (SIGTERM)")
        for rank, state in dead.items():
            finding.fail(
                f"{roster[rank]} {state}",
                f"what that rank printed; ssh {roster[rank].host} 'dmesg | tail' shows whether "
                "memory ran out",
            )
        if not dead:
            finding.fail(
                f"the launcher has ended the job, and all of {named([0], roster)} and its host's "
                "ranks live: a rank on another host has ended, or the job's time is over",
                "read what the launcher printed about it",
            )
        check = self._running or self._questions[0]
        self.add(check, finding, time.monotonic() - self._start)
        self.close("ended by the launcher")

    def _verdict(self) -> str:
        return max((row["verdict"] for row in self._rows), key=ORDER.index, default="failed")

    def _record(self, state: str) -> dict[str, Any]:
        return {
            "state": state,
            "running": self._running.name if self._running else None,
            "verdict": self._verdict(),
            "seconds": round(time.monotonic() - self._start, 2),
            **self._facts,
            "checks": self._rows,
        }

    def _save(self, state: str) -> None:
        text = json.dumps(self._record(state), indent=1, ensure_ascii=False, default=str)
        self._replace(place.JSON, text + "\n")

    def _replace(self, name: str, text: str) -> None:
        """Write a file; a directory that hangs or is full ends the writing."""
        if self._directory is None:
            return
        if not place.write(self._directory, name, text):
            self._directory = None
