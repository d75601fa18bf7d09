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


class ResNet(nn.Module):
    """A small residual network for pictures of 32x32 pixels.

    9,553,674 parameters at the width 64 and 10 classes. Input: float32 [N, 3, 32, 32], normalised;
    output: float32 [N, classes], logits. On the way, with W for the width:

        stem: convolution 3x3, batch norm, ReLU      [N, W, 32, 32]
        residual block, stride 2                     [N, 2 W, 16, 16]
        residual block, stride 2                     [N, 4 W, 8, 8]
        residual block                               [N, 8 W, 8, 8]
        residual block                               [N, 8 W, 8, 8]
        mean over the pixels                         [N, 8 W]
        dense                                        [N, classes]

    Other heights and widths of 4 pixels and more work too.

    Args:
        width: channels after the stem, at least 1; all other channels scale with it.
        classes: number of classes.

    Source: residual learning, https://arxiv.org/abs/1512.03385; the blocks here end in the sum.
    """

    def __init__(self, width: int = 64, classes: int = 10) -> None:
        super().__init__()
        self.stem = _normed(3, width, kernel=3)
        self.blocks = nn.Sequential(
            _Residual(width, 2 * width, stride=2),
            _Residual(2 * width, 4 * width, stride=2),
            _Residual(4 * width, 8 * width, stride=1),
            _Residual(8 * width, 8 * width, stride=1),
        )
        self.head = nn.Linear(8 * width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits, [N, classes], of images [N, 3, H, W]. Local."""
        x = self.blocks(F.relu(self.stem(x)))
        return self.head(x.mean(dim=(2, 3)))


class _Residual(nn.Module):
    """Two convolutions 3x3 with a ReLU between, added to their input.

    Takes [N, inputs, H, W], gives [N, outputs, H / stride, W / stride], rounded up.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = _normed(inputs, outputs, kernel=3, stride=stride)
        self.second = _normed(outputs, outputs, kernel=3)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else _normed(inputs, outputs, kernel=1, stride=stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.relu(self.first(x))) + self.shortcut(x)


def _normed(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """Return a convolution that keeps the size, or halves it, and its batch norm."""
    # With a bias, though the batch norm takes it away again: so the network is of its known size.
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))
