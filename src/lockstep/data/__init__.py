"""Data sets as tensors, and how the ranks share them out."""

from lockstep.data.folder import Folder
from lockstep.data.images import Images
from lockstep.data.load import load
from lockstep.data.pictures import ImageSet, load_pictures
from lockstep.data.shards import Batch, batches, in_order, slices, steps

__all__ = [
    "Batch",
    "Folder",
    "ImageSet",
    "Images",
    "batches",
    "in_order",
    "load",
    "load_pictures",
    "slices",
    "steps",
]
