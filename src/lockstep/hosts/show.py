"""Print what was found: a table on a terminal, plain lines elsewhere, or JSON. Local."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from lockstep.hosts.judge import CHECKS, Case, Finding

# With more hosts than this, only those with a fault get a line.
_MANY = 48
_STYLE = {"ok": "green", "FAILED": "bold red", "warning": "yellow", "-": "dim"}


@dataclass(frozen=True)
class Report:
    """The result of a check.

    Attributes:
        title: what was asked, where, by whom.
        case: plan and answers.
        findings: the faults.
        seconds: how long it took.
    """

    title: str
    case: Case
    findings: Sequence[Finding]
    seconds: float

    @property
    def verdict(self) -> str:
        """Return "failed", "warning" or "ok"."""
        verdicts = {finding.verdict for finding in self.findings}
        return next((it for it in ("failed", "warning") if it in verdicts), "ok")

    def cells(self, name: str) -> list[str]:
        """Return what each check says of a host: ok, FAILED, warning, or "-" if unknown."""
        answer = next(it for it in self.case.answers if it.name == name)
        seen = {"name", *(CHECKS if answer.facts else ("ssh", "user") if answer.login else ())}
        cells = []
        for check in CHECKS:
            mine = {it.verdict for it in self.findings if (it.host, it.check) == (name, check)}
            cell = "ok" if check in seen else "-"
            if mine:
                cell = "FAILED" if "failed" in mine else "warning"
            cells.append(cell)
        return cells


def as_json(report: Report) -> str:
    """Return the report as a JSON text."""
    hosts = []
    for it in report.case.answers:
        checks = dict(zip(CHECKS, (cell.lower() for cell in report.cells(it.name)), strict=True))
        hosts.append({"name": it.name, "listed": it.listed, "checks": checks, "facts": it.facts})
    document = {
        "verdict": report.verdict,
        "seconds": round(report.seconds, 2),
        "findings": [asdict(it) for it in report.findings],
        "hosts": hosts,
    }
    return json.dumps(document, indent=1)


def show(report: Report) -> None:
    """Print the report on standard output, as a table where that is a terminal."""
    names = [it.name for it in report.case.answers]
    if len(names) > _MANY:
        names = [name for name in names if set(report.cells(name)) != {"ok"}]
    rows = [(name, *report.cells(name)) for name in names]
    if sys.stdout.isatty():
        _table(report, rows)
    else:
        _plain(report, rows)


def lines(report: Report) -> list[str]:
    """Return a line for each fault and one or two for its cure, and the verdict at the end."""
    said: list[str] = []
    for it in report.findings:
        said.append(f"{it.host}: {it.verdict}: {it.check}: {_clean(it.found)}")
        said += [f"  to do:  {_clean(line)}" for line in it.cure.splitlines()]
    where = list(dict.fromkeys(it.host for it in report.findings))
    count = len([it for it in report.case.answers if it.listed])
    hosts = f"{count} host{'s fit together' if count != 1 else ' is well'}"
    if not where:
        said.append(f"ok: {hosts}, {report.seconds:.1f} s")
    else:
        said.append(f"{report.verdict}: see {', '.join(where)}; {report.seconds:.1f} s")
    return said


def _plain(report: Report, rows: Sequence[Sequence[str]]) -> None:
    table = [("host", *CHECKS), *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    print(report.title)
    for row in table:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
    print("\n".join(lines(report)), flush=True)


def _table(report: Report, rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    table = Table(title=report.title, title_justify="left")
    for heading in ("host", *CHECKS):
        table.add_column(heading)
    for name, *cells in rows:
        table.add_row(Text(name), *(Text(cell, style=_STYLE[cell]) for cell in cells))
    console.print(table)
    for line in lines(report):
        failed = ": failed: " in line or line.startswith("failed")
        console.print(Text(line, style="bold" if failed else ""), soft_wrap=True)


def _clean(text: str) -> str:
    """Return a text of another host without what a terminal would obey."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
