"""A set of images as one tensor, from which whole batches are taken at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from lockstep.data.shards import Batch


@dataclass(frozen=True)
class Images:
    """Images and what they show.

    Attributes:
        images: uint8 [N, C, H, W], 0 to 255.
        labels: int64 [N], each a number of a class.
        mean, deviation: of each channel over the pixels of the training set, as shares of 255.
        classes: names of the classes.
        layout: memory format of the batches.
    """

    images: torch.Tensor
    labels: torch.Tensor
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    classes: tuple[str, ...]
    layout: torch.memory_format = torch.contiguous_format

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: torch.Tensor | slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Take a batch, normalised. Local.

        Args:
            indices: int64 [n], which images; or a slice. None at all is a batch too.

        Returns:
            images, float32 [n, C, H, W], less the mean, in units of the deviation; and labels,
            int64 [n]; both on the device of the set.
        """
        if isinstance(indices, slice):
            images, labels = self.images[indices], self.labels[indices]
        else:
            # Much faster than brackets: it copies an image at a time.
            indices = indices.to(self.images.device)
            images, labels = self.images.index_select(0, indices), self.labels[indices]
        return normalised(images, self.mean, self.deviation, self.layout), labels

    def take(self, shards: Iterable[Batch]) -> Iterator[tuple[Batch, torch.Tensor, torch.Tensor]]:
        """Yield each batch of this rank with its images and labels, as `batch` returns them. Local.

        Args:
            shards: from `batches` or `in_order`.
        """
        for shard in shards:
            yield (shard, *self.batch(shard.indices))

    def to(self, device: torch.device, layout: torch.memory_format) -> Images:
        """Return the set on a device, with a memory format for its batches. Local."""
        return replace(
            self, images=self.images.to(device), labels=self.labels.to(device), layout=layout
        )


def normalised(
    images: torch.Tensor,
    mean: tuple[float, ...],
    deviation: tuple[float, ...],
    layout: torch.memory_format,
) -> torch.Tensor:
    """Return images as a network takes them. Local.

    Args:
        images: uint8 [n, C, H, W]; not changed.
        mean, deviation: of each channel, as shares of 255.
        layout: memory format of the result.

    Returns:
        float32 [n, C, H, W], less the mean, in units of the deviation.
    """
    pair = torch.tensor((mean, deviation), dtype=torch.float64).mul_(255.0)
    less, unit = pair.to(images.device, torch.float32)[:, :, None, None]
    # The layout last: this arithmetic is slow where channels lie side by side.
    return images.float().sub_(less).div_(unit).contiguous(memory_format=layout)
