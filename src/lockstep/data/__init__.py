"""Data sets as tensors, and how the ranks share them out."""

from lockstep.data.digits import Digits
from lockstep.data.load import load
from lockstep.data.shards import Batch, batches, slices, steps

__all__ = ["Batch", "Digits", "batches", "load", "slices", "steps"]
