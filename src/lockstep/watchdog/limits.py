"""When a watcher speaks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """When to speak.

    Attributes:
        warn: seconds after which a call that stands is told of, once.
        longest: seconds; with wait, the limit of calls whose timeout is put off.
        wait: after the verdict at the limit go on waiting instead of ending the job.
    """

    warn: float
    longest: float
    wait: bool
