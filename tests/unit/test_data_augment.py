"""Random crops and mirror images, against a plain loop over the images."""

from __future__ import annotations

import pytest
import torch

from lockstep.data.augment import crop_and_flip
from lockstep.errors import SettingsError


def pixel(x: torch.Tensor, c: int, row: int, column: int) -> float:
    """Return a pixel, 0 outside of the image."""
    inside = 0 <= row < x.shape[1] and 0 <= column < x.shape[2]
    return x[c, row, column].item() if inside else 0


def plainly(x: torch.Tensor, generator: torch.Generator, padding: int) -> torch.Tensor:
    """Do the same an image and a pixel at a time."""
    n, channels, height, width = x.shape
    down, right = torch.randint(2 * padding + 1, (2, n), generator=generator).tolist()
    flips = torch.randint(2, (n,), generator=generator, dtype=torch.bool).tolist()
    result = torch.empty_like(x)
    for i in range(n):
        for c in range(channels):
            for row in range(height):
                for column in range(width):
                    source = width - 1 - column if flips[i] else column
                    at = row + down[i] - padding, source + right[i] - padding
                    result[i, c, row, column] = pixel(x[i], c, *at)
    return result


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("shape", "padding"),
    [((9, 3, 8, 8), 4), ((5, 1, 4, 7), 2), ((1, 2, 3, 3), 5), ((4, 3, 5, 5), 0), ((0, 3, 8, 8), 4)],
)
def test_it_is_the_plain_loop(shape: tuple[int, ...], padding: int, dtype: torch.dtype) -> None:
    """Each image has an offset of its own, and none at all is a batch too."""
    x = (torch.rand(shape, generator=torch.Generator().manual_seed(5)) * 255).to(dtype)
    before = x.clone()
    found = crop_and_flip(x, torch.Generator().manual_seed(7), padding)
    assert torch.equal(found, plainly(x, torch.Generator().manual_seed(7), padding))
    assert found.dtype == dtype
    assert torch.equal(x, before)


def test_the_same_generator_gives_the_same() -> None:
    """Whatever has been drawn from the global one; and it goes on from its state."""
    x = torch.rand(16, 3, 8, 8)
    generator = torch.Generator().manual_seed(1)
    first, state = crop_and_flip(x, generator), generator.get_state()
    second = crop_and_flip(x, generator)
    torch.rand(3)
    assert torch.equal(crop_and_flip(x, torch.Generator().manual_seed(1)), first)
    assert torch.equal(crop_and_flip(x, torch.Generator().set_state(state)), second)
    assert not torch.equal(first, second)


def test_all_offsets_and_both_sides_occur() -> None:
    """As often as each other: a single bright pixel shows where each image went."""
    n, padding = 20_000, 2
    x = torch.zeros(n, 1, 7, 8, dtype=torch.uint8)
    x[:, :, 3, 3] = 1
    found = crop_and_flip(x, torch.Generator().manual_seed(3), padding)
    rows, columns = found.sum(dim=(0, 1, 3)), found.sum(dim=(0, 1, 2))
    assert rows.tolist()[:1] + rows.tolist()[6:] == [0, 0]
    # A share of 1/5 of 20,000 varies by 57, a standard deviation.
    assert ((rows[1:6] - n / 5).abs() < 6 * 57).all()
    # Columns 1 to 5 as it is, 6 to 2 mirrored: the ends come by one way, the middle by both.
    shares = torch.tensor([0.0, 0.1, 0.2, 0.2, 0.2, 0.2, 0.1, 0.0])
    assert ((columns / n - shares).abs() < 6 * 0.003).all()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_memory_format_is_kept(layout: torch.memory_format) -> None:
    """And makes no difference to the images."""
    x = torch.rand(4, 3, 8, 8)
    expected = crop_and_flip(x, torch.Generator().manual_seed(1))
    found = crop_and_flip(x.contiguous(memory_format=layout), torch.Generator().manual_seed(1))
    assert found.is_contiguous(memory_format=layout)
    assert torch.equal(found, expected)


def test_padding_below_zero_is_refused() -> None:
    """By an error that says so."""
    with pytest.raises(SettingsError, match="padding -1"):
        crop_and_flip(torch.rand(1, 1, 4, 4), torch.Generator(), -1)
