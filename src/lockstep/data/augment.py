"""Change the images of a training batch at random, the whole batch at a time."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from lockstep.errors import SettingsError


def crop_and_flip(x: torch.Tensor, generator: torch.Generator, padding: int = 4) -> torch.Tensor:
    """Shift each image by up to `padding` pixels each way, and mirror half of them. Local.

    Each image is padded by zeros, which is black in a batch of bytes and the mean colour in a
    normalised one, and cropped to its size at an offset of its own; then it is mirrored left to
    right with probability 1/2. What is drawn depends on the generator and the number of images
    alone.

    Args:
        x: any dtype, [N, C, H, W], such as a batch of bytes or a normalised one; N may be 0.
        generator: on the CPU or on x's device; it moves on by 3 N numbers.
        padding: pixels, 0 or more.

    Returns:
        a new tensor, like x in dtype, shape, device and memory format.

    Raises:
        SettingsError: the padding is below 0.

    Source: the augmentation of https://arxiv.org/abs/1409.5185.
    """
    if padding < 0:
        raise SettingsError(f"found padding {padding}", needed="0 or more", cure="change it")
    n, _, height, width = x.shape
    where = generator.device
    offsets = torch.randint(2 * padding + 1, (2, n), generator=generator, device=where)
    flips = torch.randint(2, (n,), generator=generator, device=where, dtype=torch.bool)
    down, right = offsets.to(x.device)
    # [N, C, 2 padding + 1, 2 padding + 1, H, W]: all crops of all images, of which none is copied.
    crops = pad(x.contiguous(), (padding,) * 4).unfold(2, height, 1).unfold(3, width, 1)
    cropped = crops[torch.arange(n, device=x.device), :, down, right]
    mirrored = torch.where(flips.to(x.device)[:, None, None, None], cropped.flip(3), cropped)
    last = n and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    layout = torch.channels_last if last else torch.contiguous_format
    return mirrored.contiguous(memory_format=layout)
