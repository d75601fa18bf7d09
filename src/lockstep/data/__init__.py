"""Data sets as tensors, and how the ranks share them out."""

from lockstep.data.images import Images
from lockstep.data.load import load
from lockstep.data.shards import Batch, batches, in_order, slices, steps

__all__ = ["Batch", "Images", "batches", "in_order", "load", "slices", "steps"]
