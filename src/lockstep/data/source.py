"""Where the pictures of a set come from: how many there are, and a way to write them down."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

# Mean and standard deviation of the channels of CIFAR-10's training set, as shares of 255.
MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)

# Writes the pictures into uint8 [N, 3, S, S], and yields now and then while it does.
Fill = Callable[[torch.Tensor], Iterator[None]]


@dataclass(frozen=True)
class Part:
    """The pictures to train with, or those to test with.

    Attributes:
        labels: int64 [N].
        fill: writes the pictures down.
    """

    labels: torch.Tensor
    fill: Fill

    @property
    def count(self) -> int:
        """Number of pictures."""
        return len(self.labels)


@dataclass(frozen=True)
class Source:
    """A set of pictures that are not decoded yet.

    Attributes:
        size: height and width of the pictures, in pixels.
        classes: their names.
        mean, deviation: of the three channels, as shares of 255.
        train, test: the two parts.
    """

    size: int
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    train: Part
    test: Part

    @property
    def bytes(self) -> int:
        """Memory that the decoded pictures take."""
        return (self.train.count + self.test.count) * 3 * self.size**2


def of_tensors(images: torch.Tensor, labels: torch.Tensor) -> Part:
    """Return a part of pictures that are in memory already. Local.

    Args:
        images: uint8 [N, 3, S, S].
        labels: int64 [N].
    """

    def fill(into: torch.Tensor) -> Iterator[None]:
        into.copy_(images)
        yield

    return Part(labels, fill)
