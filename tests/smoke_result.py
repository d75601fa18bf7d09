"""What a smoke test has left: its end, and its record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from launching import Outcome


@dataclass(frozen=True)
class Result:
    """How a smoke test ended, and what it has written."""

    outcome: Outcome
    record: dict[str, Any]

    def check(self, name: str) -> dict[str, Any]:
        """Return one check of smoke.json."""
        return next(it for it in self.record["checks"] if it["name"] == name)

    def faults(self, name: str) -> str:
        """Return all that a check has found wrong."""
        return "\n".join(it["found"] for it in self.check(name)["faults"])
