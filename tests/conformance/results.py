"""What a run of torch's suite leaves behind: one verdict a test, kept in a JSON file."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PASSED = "passed"
SKIPPED = "skipped"
FAILED = "failed"
# Never a verdict of a finished run: what the file says of a test while it is being run, so that
# a job that dies without a word still names the test it died in.
RUNNING = "running"


@dataclass(frozen=True)
class Verdict:
    """The outcome of one test, of one rank or of the whole job."""

    outcome: str
    reason: str = ""
    seconds: float = 0.0


def headline(traceback: str) -> str:
    """Return the first line of the last exception in a traceback."""
    last = traceback.rpartition("Traceback (most recent call last):")[2]
    lines = [line for line in last.splitlines() if line.strip() and not line.startswith(" ")]
    return lines[0] if lines else ""


def agree(verdicts: list[Verdict]) -> Verdict:
    """Make one verdict of what the ranks found: a failure of any of them counts for all."""
    seconds = max(verdict.seconds for verdict in verdicts)
    failed = [rank for rank, verdict in enumerate(verdicts) if verdict.outcome == FAILED]
    if failed:
        texts = dict.fromkeys(headline(verdicts[rank].reason) for rank in failed)
        return Verdict(FAILED, f"ranks {failed}: " + " | ".join(texts), seconds)
    skipped = [rank for rank, verdict in enumerate(verdicts) if verdict.outcome == SKIPPED]
    if skipped:
        where = "" if len(skipped) == len(verdicts) else f" (only on ranks {skipped})"
        return Verdict(SKIPPED, verdicts[skipped[0]].reason + where, seconds)
    return Verdict(PASSED, "", seconds)


class Report:
    """The verdicts of a run so far; with a path, each is on disk as soon as it is known."""

    def __init__(self, meta: Mapping[str, Any], path: Path | None = None) -> None:
        """Start an empty report that describes its run by ``meta``."""
        self.meta = dict(meta)
        self.path = path
        self.tests: dict[str, Verdict] = {}

    def record(self, name: str, verdict: Verdict) -> None:
        """Keep a test's verdict and write the file anew."""
        self.tests[name] = verdict
        self.save()

    def save(self) -> None:
        """Write the file; a reader never sees half of it."""
        if self.path is None:
            return
        tests = {name: asdict(verdict) for name, verdict in sorted(self.tests.items())}
        text = json.dumps({"meta": self.meta, "tests": tests}, indent=1) + "\n"
        partial = self.path.with_suffix(self.path.suffix + ".part")
        partial.write_text(text)
        os.replace(partial, self.path)

    def count(self, outcome: str) -> int:
        """Tell how many tests ended in ``outcome``."""
        return Counter(verdict.outcome for verdict in self.tests.values())[outcome]

    def names(self, outcome: str) -> list[str]:
        """List the tests that ended in ``outcome``."""
        return sorted(name for name, verdict in self.tests.items() if verdict.outcome == outcome)

    def totals(self) -> str:
        """Put the counts in one line."""
        return (
            f"passed {self.count(PASSED)}, skipped {self.count(SKIPPED)}, "
            f"failed {self.count(FAILED)}"
        )


def load_report(path: Path) -> Report:
    """Read a report; the test an earlier job died in becomes a failure."""
    content = json.loads(path.read_text())
    report = Report(content["meta"], path)
    for name, fields in content["tests"].items():
        verdict = Verdict(**fields)
        if verdict.outcome == RUNNING:
            verdict = Verdict(FAILED, "the job ended in this test")
        report.tests[name] = verdict
    return report
