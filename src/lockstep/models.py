"""The networks."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class ConvNet(nn.Module):
    """The network of PyTorch's MNIST example: two convolutions, two dense layers.

    21,840 parameters. Input: float32 [N, 1, 28, 28], normalised; output: float32 [N, 10],
    logarithms of the probabilities of the ten digits. On the way:

        convolution 5x5, max-pool 2, ReLU              [N, 10, 12, 12]
        convolution 5x5, Dropout2d, max-pool 2, ReLU   [N, 20, 4, 4]
        dense, ReLU, dropout                           [N, 50]
        dense, log-softmax                             [N, 10]

    Source: https://github.com/pytorch/examples, mnist/main.py, of 2017.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.conv2_drop = nn.Dropout2d()
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logarithms of the probabilities, [N, 10], of images [N, 1, 28, 28]. Local."""
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2_drop(self.conv2(x)), 2))
        # Not -1: a rank may have no image at all in the last batch.
        x = x.reshape(len(x), 320)
        x = F.dropout(F.relu(self.fc1(x)), training=self.training)
        return F.log_softmax(self.fc2(x), dim=1)
