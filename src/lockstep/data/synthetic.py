"""Pictures that are made up: no file is needed, and a network can learn to tell them apart."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.functional import pad

from lockstep.data import sample
from lockstep.data.digits import DEVIATION as INK_DEVIATION
from lockstep.data.digits import MEAN as INK
from lockstep.data.images import Images
from lockstep.data.source import Part, Source, of_tensors

_CLASSES, _BLOCKS = 10, 4
_COUNTS = (10_000, 2_000)
# Half the contrast of a pattern, and the noise that hides it.
_CONTRAST, _NOISE = 24, 80


def synthetic(size: int = 32, seed: int = 1) -> Source:
    """Return 10,000 and 2,000 pictures: a coarse pattern for each class, under noise. Local.

    They are made of whole numbers, so that they are the same on every machine.

    Args:
        size: height and width, at least 4.
        seed: another one gives other patterns and other noise.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (_CLASSES, 3, _BLOCKS, _BLOCKS)
    signs = torch.randint(2, shape, generator=generator, dtype=torch.int16) * 2 - 1
    at = torch.arange(size) * _BLOCKS // size
    patterns = 128 + _CONTRAST * signs[:, :, at][:, :, :, at]
    train, test = (
        _part(patterns, count, seed + 1000 * number)
        for number, count in enumerate(_COUNTS, start=1)
    )
    names = tuple(f"pattern {number}" for number in range(_CLASSES))
    # A share of the noise's own: it is spread evenly over its range.
    deviation = ((_CONTRAST**2 + _NOISE * (_NOISE + 1) / 3) ** 0.5) / 255
    return Source(size, names, (128 / 255,) * 3, (deviation,) * 3, train, test)


def _part(patterns: torch.Tensor, count: int, seed: int) -> Part:
    labels = torch.arange(count) % len(patterns)

    def fill(into: torch.Tensor) -> Iterator[None]:
        generator = torch.Generator().manual_seed(seed)
        for images, marks in zip(into.split(1000), labels.split(1000), strict=True):
            noise = torch.randint(
                -_NOISE, _NOISE + 1, images.shape, generator=generator, dtype=torch.int16
            )
            images.copy_(patterns[marks] + noise)
            yield

    return Part(labels, fill)


def digits(size: int = 32) -> Source:
    """Return the digits of `sample.load` as pictures: with a margin, in three equal colours. Local.

    Args:
        size: height and width, at least 28.

    Raises:
        DataError: the digits are not there.
    """
    train, test = sample.load()
    # Mean and deviation of the pixels, of which the share in the middle was there before.
    share = (28 / size) ** 2
    mean = share * INK
    deviation = (share * (INK_DEVIATION**2 + INK**2) - mean**2) ** 0.5
    parts = (_padded(train, size), _padded(test, size))
    return Source(size, train.classes, (mean,) * 3, (deviation,) * 3, *parts)


def _padded(images: Images, size: int) -> Part:
    low = (size - 28) // 2
    high = size - 28 - low
    padded = pad(images.images, (low, high, low, high)).expand(-1, 3, -1, -1)
    return of_tensors(padded, images.labels)
