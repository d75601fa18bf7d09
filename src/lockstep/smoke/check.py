"""What a check is: a question, what each rank measures, and what the root makes of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from lockstep.smoke.pictures import Picture
from lockstep.world import World

Verdict = Literal["ok", "warning", "failed", "not applicable", "not run"]
# Seconds that the slowest checks have.
LONGEST = 30.0
# From the best to the worst; "not run" is what a check gets that could not even be tried.
ORDER: tuple[Verdict, ...] = ("not applicable", "ok", "warning", "not run", "failed")


@dataclass(frozen=True)
class Who:
    """One rank, as messages name it."""

    rank: int
    host: str
    node: int
    local_rank: int
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})"


def who(world: World) -> Who:
    """Return this rank as others name it. Local."""
    return Who(world.rank, world.host, world.node, world.local_rank, os.getpid())


@dataclass(frozen=True)
class Options:
    """What the checks are told.

    Attributes:
        shared: the directory that all nodes are to share.
        data_dir: where MNIST and CIFAR-10 are; None leaves that check out.
        per_node: ranks expected on each node; None if any number will do.
        hostfile: which the launcher was given; None if none.
        limit: seconds that a check may take at most; above what is usual, each gets more.
        within: seconds for all checks together.
    """

    shared: Path
    data_dir: Path | None = None
    per_node: int | None = None
    hostfile: Path | None = None
    limit: float = LONGEST
    within: float = 50.0

    def limit_of(self, usual: float) -> float:
        """Return the limit of a check that usually has so many seconds. Local."""
        return min(usual * max(1.0, self.limit / LONGEST), self.limit)


@dataclass
class Lab:
    """What a check works with.

    Attributes:
        world: the ranks, on a communicator that only the checks use.
        options: what was asked for.
        roster: all ranks by number; filled on the root alone.
        crowded: hosts without a core for each rank, and why; the check of the CPUs notes them on
            the root, for the checks after it.
        to_remove: what a check that is broken off leaves behind in a shared directory.
    """

    world: World
    options: Options
    roster: Mapping[int, Who] = field(default_factory=dict)
    crowded: dict[str, str] = field(default_factory=dict)
    to_remove: list[Path] = field(default_factory=list)


@dataclass(frozen=True)
class Fault:
    """One thing that is not as it should be, and what to do about it."""

    verdict: Verdict
    found: str
    cure: str


@dataclass
class Finding:
    """What a check has found: ok, until a fault is added to it.

    Attributes:
        summary: one line.
        faults: with the cure of each.
        details: numbers and texts for smoke.json, as JSON can hold them.
        pictures: for smoke.html.
        applicable: False if there is nothing here to check.
        ran: False if the check could not even be tried.
    """

    summary: str = ""
    faults: list[Fault] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    pictures: list[Picture] = field(default_factory=list)
    applicable: bool = True
    ran: bool = True

    @property
    def verdict(self) -> Verdict:
        """The worst of the faults."""
        if not self.ran:
            return "not run"
        start: Verdict = "ok" if self.applicable else "not applicable"
        return max((start, *(fault.verdict for fault in self.faults)), key=ORDER.index)

    def warn(self, found: str, cure: str) -> None:
        """Add a fault that training survives. Local."""
        self.faults.append(Fault("warning", found, cure))

    def fail(self, found: str, cure: str) -> None:
        """Add a fault that training does not survive, or not rightly. Local."""
        self.faults.append(Fault("failed", found, cure))


class Check:
    """One question about the cluster. Its subclasses have one small file each.

    Attributes:
        name: one word.
        question: what it asks.
        limit: seconds after which it is given up.
        together: whether the ranks talk to each other in `measure`, so that all of them are needed.
    """

    name: ClassVar[str]
    question: ClassVar[str]
    limit: ClassVar[float] = 10.0
    together: ClassVar[bool] = False

    def measure(self, lab: Lab) -> Any:
        """Return what this rank finds; small, since it travels to the root.

        Local, or Collective where `together` is set; every wait in it has a limit.
        """
        raise NotImplementedError

    def judge(self, answers: Mapping[int, Any], lab: Lab) -> Finding:
        """Return the verdict on what the ranks have found. Local, on the root.

        Args:
            answers: by rank; ranks that failed to measure are left out, at least one has not.
            lab: its roster has all ranks.
        """
        raise NotImplementedError
