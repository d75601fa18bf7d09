"""What a run leaves behind: its settings, its measurements, its curves, and the mark of its end."""

from lockstep.metrics.curves import draw
from lockstep.metrics.directory import RunDirectory, done_already
from lockstep.metrics.opening import DONE
from lockstep.metrics.records import EPOCH, STEP, current, read
from lockstep.metrics.surroundings import git_id

__all__ = [
    "DONE",
    "EPOCH",
    "STEP",
    "RunDirectory",
    "current",
    "done_already",
    "draw",
    "git_id",
    "read",
]
