"""A set of digits as one tensor, from which whole batches are taken at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Mean and standard deviation of the pixels of MNIST's training set, as shares of white.
MEAN, DEVIATION = 0.1307, 0.3081


@dataclass(frozen=True)
class Digits:
    """Images of handwritten digits and what they show.

    Attributes:
        images: uint8 [N, 1, 28, 28], 0 is the paper, 255 the ink.
        labels: int64 [N], 0 to 9.
        layout: memory format of the batches.
    """

    images: torch.Tensor
    labels: torch.Tensor
    layout: torch.memory_format = torch.contiguous_format

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: torch.Tensor | slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Take a batch, normalised. Local.

        Args:
            indices: int64 [n], which images; or a slice. None at all is a batch too.

        Returns:
            images, float32 [n, 1, 28, 28], with the mean 0 and the deviation 1 of the training
            set; and labels, int64 [n]; both on the device of the set.
        """
        images = self.images[indices].float().sub_(MEAN * 255).div_(DEVIATION * 255)
        return images.contiguous(memory_format=self.layout), self.labels[indices]

    def to(self, device: torch.device, layout: torch.memory_format) -> Digits:
        """Return the set on a device, with a memory format for its batches. Local."""
        return Digits(self.images.to(device), self.labels.to(device), layout)
