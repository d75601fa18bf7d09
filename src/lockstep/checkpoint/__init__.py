"""Checkpoints that survive a kill at any moment, and the way back from them.

A checkpoint holds all that a training needs to go on as if nothing had been: what the job gives to
`Checkpoints.save`, and the random states of every rank.
"""

from lockstep.checkpoint.checkpoints import Checkpoints
from lockstep.checkpoint.export import check_export, export
from lockstep.checkpoint.random_state import random_state, restore_random
from lockstep.checkpoint.state import load_model, load_optimizer

__all__ = [
    "Checkpoints",
    "check_export",
    "export",
    "load_model",
    "load_optimizer",
    "random_state",
    "restore_random",
]
