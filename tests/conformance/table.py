"""Compares the verdicts of runs of torch's suite and prints them as a table in markdown.

python tests/conformance/table.py gloo-name.json mpi.json
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from results import FAILED, PASSED, SKIPPED, Report, load_report

REFERENCE = Path(__file__).with_name("gloo.json")


def label(report: Report) -> str:
    """Say which run a report is of."""
    return f"{report.meta['backend']}, {report.meta['ranks']} ranks, {report.meta['mpi']}"


def count_table(reports: list[Report]) -> list[str]:
    """Make a line of counts for each run."""
    lines = ["| run | tests | passed | skipped | failed |", "|---|---|---|---|---|"]
    for report in reports:
        counts = " | ".join(str(report.count(outcome)) for outcome in (PASSED, SKIPPED, FAILED))
        lines.append(f"| {label(report)} | {len(report.tests)} | {counts} |")
    return lines


def cell(text: str) -> str:
    """Make a text fit into a table's cell."""
    return " ".join(text.split()).replace("|", "\\|")


def missing(ours: Report, reference: Report) -> list[tuple[str, str, str]]:
    """List what passes in the reference and not in ours: test, outcome, reason."""
    found = []
    for name in reference.names(PASSED):
        verdict = ours.tests.get(name)
        if verdict is None:
            found.append((name, "not run", ""))
        elif verdict.outcome != PASSED:
            found.append((name, verdict.outcome, verdict.reason))
    return found


def uncovered(reports: list[Report], reference: Report) -> list[str]:
    """List what passes in the reference and in none of our runs."""
    passed = {name for report in reports for name in report.names(PASSED)}
    return [name for name in reference.names(PASSED) if name not in passed]


def test_table(rows: list[tuple[str, str, str]]) -> list[str]:
    """Make a line for each test."""
    if not rows:
        return ["none"]
    lines = ["| test | outcome | reason |", "|---|---|---|"]
    return lines + [f"| {name} | {outcome} | {cell(reason)} |" for name, outcome, reason in rows]


def render(reports: list[Report], reference: Report) -> str:
    """Put the whole comparison into one text."""
    lines = ["## Counts", "", *count_table([reference, *reports])]
    for report in reports:
        lines += ["", f"## Passes in {label(reference)}, not in {label(report)}", ""]
        lines += test_table(missing(report, reference))
        others = set(report.names(FAILED)) - set(reference.names(PASSED))
        failures = [(name, FAILED, report.tests[name].reason) for name in sorted(others)]
        lines += ["", f"## Other failures in {label(report)}", "", *test_table(failures)]
    lines += ["", f"## Passes in {label(reference)} and in no run of ours", ""]
    lines += [f"- {name}" for name in uncovered(reports, reference)] or ["none"]
    return "\n".join(lines)


def main() -> int:
    """Print the comparison; return 1 if ours fails a test or lacks one of the reference's."""
    parser = argparse.ArgumentParser(description="compare runs of torch's suite")
    parser.add_argument("ours", type=Path, nargs="+", help="JSON files of run.py")
    parser.add_argument(
        "--against", type=Path, default=REFERENCE, help="JSON file of gloo (default: %(default)s)"
    )
    options = parser.parse_args()
    reference = load_report(options.against)
    reports = [load_report(path) for path in options.ours]
    print(render(reports, reference))
    failed = any(report.count(FAILED) for report in reports)
    return 1 if failed or uncovered(reports, reference) else 0


if __name__ == "__main__":
    sys.exit(main())
