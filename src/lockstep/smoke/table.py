"""The table on the terminal: by rich where there is one, as plain lines otherwise."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from lockstep import launcher
from lockstep.errors import counted
from lockstep.world import World

_COLORS = {"ok": "green", "warning": "yellow", "failed": "bold red", "not run": "red"}


class Table:
    """Rows as they come, and in the end the whole."""

    def __init__(self, world: World) -> None:
        self._rich = sys.stdout.isatty()
        self._rows: list[dict[str, Any]] = []
        ranks = counted(world.size, "rank")
        self._print(f"smoke test: {ranks} on {counted(world.nodes, 'node')}")

    def begin(self, name: str) -> None:
        """Say what is on; plain lines say it when it is over."""
        if self._rich:
            self._print(f"  {name} …")

    def add(self, row: dict[str, Any]) -> None:
        """Take a row; plain lines are printed at once."""
        self._rows.append(row)
        if not self._rich:
            for line in plain(row):
                self._print(line)

    def close(self, record: dict[str, Any], directory: Path | None) -> None:
        """Print the table, the verdict and where to read more."""
        if self._rich:
            _print_by_rich(self._rows)
        self._print(f"smoke test: {record['verdict']} after {record['seconds']:.1f} s")
        if directory is not None:
            self._print(f"Written to {directory}: smoke.html, smoke.json")

    def _print(self, text: str) -> None:
        print(text, flush=True)


def plain(row: dict[str, Any]) -> list[str]:
    """Return the lines for a check, its faults and their cures below it. Local."""
    lines = [f"{row['verdict']:<14} {row['name']:<12} {row['seconds']:5.1f} s  {row['summary']}"]
    for fault in row["faults"]:
        lines.append(f"    {fault['verdict']}: {fault['found']}")
        lines.append(f"      to do: {fault['cure']}")
    return lines


def _print_by_rich(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table as RichTable

    # Open MPI gives its ranks a terminal of their own, also where its output goes to a file.
    borrowed = launcher.announced().kind == "openmpi"
    console = Console(color_system=None if borrowed else "auto")
    shown = RichTable("check", "verdict", "s", "what was found; what to do", expand=False)
    for row in rows:
        text = [escape(row["summary"])] if row["summary"] else []
        for fault in row["faults"]:
            if fault["found"] != row["summary"]:
                text.append(f"[{_COLORS.get(fault['verdict'], '')}]•[/] {escape(fault['found'])}")
            text.append(f"  to do: {escape(fault['cure'])}")
        verdict = row["verdict"]
        colored = f"[{_COLORS[verdict]}]{verdict}[/]" if verdict in _COLORS else verdict
        shown.add_row(row["name"], colored, f"{row['seconds']:.1f}", "\n".join(text))
    console.print(shown)
