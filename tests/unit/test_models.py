"""The networks: their sizes, shapes, and what they are made of."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lockstep.models import ResNet


def count(model: nn.Module) -> int:
    """Return the number of parameters."""
    return sum(p.numel() for p in model.parameters())


def by_formula(width: int, classes: int) -> int:
    """Count what is described: convolutions with bias, scale and shift of each, the dense layer."""
    total = 0
    w = width
    blocks = [(w, 2 * w), (2 * w, 4 * w), (4 * w, 8 * w), (8 * w, 8 * w)]
    convolutions = [(3, w, 3)]
    for inputs, outputs in blocks:
        convolutions += [(inputs, outputs, 3), (outputs, outputs, 3)]
        if inputs != outputs:
            convolutions.append((inputs, outputs, 1))
    for inputs, outputs, kernel in convolutions:
        total += inputs * outputs * kernel**2 + outputs + 2 * outputs
    return total + 8 * w * classes + classes


def test_resnet_at_its_default_width() -> None:
    """It is the network that is known by this number."""
    assert count(ResNet()) == 9_553_674


@pytest.mark.parametrize(("width", "classes"), [(1, 2), (8, 10), (16, 100), (64, 10)])
def test_every_channel_count_scales(width: int, classes: int) -> None:
    """The size follows from the width."""
    assert count(ResNet(width, classes)) == by_formula(width, classes)


@pytest.mark.parametrize("side", [4, 32, 33])
@pytest.mark.parametrize("n", [0, 1, 3])
def test_shapes(n: int, side: int) -> None:
    """Logits of each image; in a test no image is a batch too."""
    model = ResNet(4, 7).eval()
    assert model(torch.rand(n, 3, side, side)).shape == (n, 7)


def test_shapes_on_the_way() -> None:
    """Those that the docstring names."""
    seen = []
    model = ResNet(2)
    for part in (model.stem, *model.blocks):
        part.register_forward_hook(lambda _m, _i, output: seen.append(tuple(output.shape[1:])))
    model(torch.rand(2, 3, 32, 32))
    assert seen == [(2, 32, 32), (4, 16, 16), (8, 8, 8), (16, 8, 8), (16, 8, 8)]


def test_a_block_ends_in_the_sum() -> None:
    """Computed again from its parts: convolution, norm, ReLU, convolution, norm, plus the rest."""
    model = ResNet(4).eval()
    for number, block in enumerate(model.blocks):
        x = torch.randn(2, block.first[0].in_channels, 8, 8)
        stride = 2 if number < 2 else 1

        def normed(part: nn.Module, x: torch.Tensor, stride: int, pad: int) -> torch.Tensor:
            convolution, norm = part
            x = F.conv2d(x, convolution.weight, convolution.bias, stride=stride, padding=pad)
            mean, variance = norm.running_mean, norm.running_var
            return F.batch_norm(x, mean, variance, norm.weight, norm.bias)

        rest = x if number == 3 else normed(block.shortcut, x, stride, 0)
        expected = normed(block.second, normed(block.first, x, stride, 1).relu(), 1, 1) + rest
        assert (expected < 0).any()
        torch.testing.assert_close(block(x), expected)


def test_it_learns() -> None:
    """Few steps on noise that it can only know by heart."""
    torch.manual_seed(1)
    model, x, y = ResNet(4), torch.randn(16, 3, 32, 32), torch.arange(16) % 10
    adam = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for _ in range(15):
        adam.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        adam.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 4
