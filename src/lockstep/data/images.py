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
        images = self.images[indices]
        mean, deviation = scale(self.mean, self.deviation, images.device)
        normalised = images.float().sub_(mean).div_(deviation)
        return normalised.contiguous(memory_format=self.layout), self.labels[indices]

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


def scale(
    mean: tuple[float, ...], deviation: tuple[float, ...], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and deviation in steps of a pixel of 8 bits, each float32 [C, 1, 1]. Local."""
    pair = torch.tensor((mean, deviation), dtype=torch.float64).mul_(255.0)
    both = pair.to(device, torch.float32)[:, :, None, None]
    return both[0], both[1]
