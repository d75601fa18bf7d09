"""The report as one page of HTML that needs nothing else: no links, no scripts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from lockstep.errors import counted
from lockstep.smoke.check import Finding
from lockstep.smoke.pictures import draw

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
       color: #1b1f24; background: #fff; }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin: 2rem 0 .3rem }
table { border-collapse: collapse; width: 100% } td, th { text-align: left; padding: .3rem .6rem;
       border-bottom: 1px solid #d8dee4; vertical-align: top }
.v { border-radius: .6rem; padding: .05rem .55rem; font-size: .85em; white-space: nowrap;
     background: #eaeef2 }
.ok { background: #d2f4d9 } .warning { background: #fff0b8 }
.failed, .not-run { background: #ffd7d5 }
code, pre { background: #f4f6f8; border-radius: .3rem; font-size: .88em }
code { padding: .05rem .3rem } pre { padding: .6rem; overflow-x: auto }
svg { max-width: 100%; margin: .4rem 1rem .4rem 0; vertical-align: top }
.q { color: #57606a; margin: 0 0 .5rem }
"""


def page(record: dict[str, Any], findings: Sequence[Finding]) -> str:
    """Return the page. Local.

    Args:
        record: what smoke.json holds.
        findings: those of the same checks; they have the pictures.
    """
    head = (
        f"{counted(record['ranks'], 'rank')} on {counted(record['nodes'], 'node')}, "
        f"started {record['started']}, "
        f"{record['seconds']:.1f} s"
    )
    rows = "".join(_row(row) for row in record["checks"])
    sections = "".join(
        _section(row, [draw(picture) for picture in finding.pictures])
        for row, finding in zip(record["checks"], findings, strict=True)
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>Smoke test: {escape(record['verdict'])}</title><style>{_STYLE}</style></head>"
        f"<body><h1>Smoke test {_chip(record['verdict'])}</h1><p>{escape(head)}</p>"
        f"<table><tr><th>check<th>verdict<th>seconds<th>what was found</tr>{rows}</table>"
        f"{sections}<h2>Command</h2><pre>{escape(' '.join(record['command']))}</pre>"
        "</body></html>\n"
    )


def _chip(verdict: str) -> str:
    return f'<span class="v {escape(verdict.replace(" ", "-"))}">{escape(verdict)}</span>'


def _row(row: dict[str, Any]) -> str:
    name = escape(row["name"])
    return (
        f'<tr><td><a href="#{name}">{name}</a><td>{_chip(row["verdict"])}'
        f"<td>{row['seconds']:.1f}<td>{escape(row['summary'])}</tr>"
    )


def _section(row: dict[str, Any], images: list[str]) -> str:
    faults = "".join(
        f"<p>{_chip(fault['verdict'])} {escape(fault['found'])}<br>"
        f"to do: <code>{escape(fault['cure'])}</code></p>"
        for fault in row["faults"]
    )
    details = ""
    if row["details"]:
        text = json.dumps(row["details"], indent=1, ensure_ascii=False, default=str)
        details = f"<details><summary>details</summary><pre>{escape(text)}</pre></details>"
    return (
        f'<h2 id="{escape(row["name"])}">{escape(row["name"])} {_chip(row["verdict"])}</h2>'
        f'<p class="q">{escape(row["question"])}</p><p>{escape(row["summary"])}</p>'
        f"{faults}{''.join(images)}{details}"
    )
