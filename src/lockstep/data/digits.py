"""Handwritten digits of MNIST: how their pixels are distributed, and what they are called."""

from __future__ import annotations

import torch

from lockstep.data.images import Images

# Mean and standard deviation of the pixels of MNIST's training set, as shares of white.
MEAN, DEVIATION = 0.1307, 0.3081


def digits(images: torch.Tensor, labels: torch.Tensor) -> Images:
    """Return a set of digits. Local.

    Args:
        images: uint8 [N, 1, 28, 28], 0 is the paper, 255 the ink.
        labels: int64 [N], 0 to 9.
    """
    return Images(images, labels, (MEAN,), (DEVIATION,), tuple("0123456789"))
