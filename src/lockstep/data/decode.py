"""From the bytes of an image file to pixels of one size."""

from __future__ import annotations

import io
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from PIL import Image
from torch.nn.functional import interpolate

from lockstep import files
from lockstep.errors import DataError

# What the name of an image file ends in.
SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
# Images that a thread decodes before it says so; threads at most.
_CHUNK, _THREADS = 64, 8


def decode(path: str, size: int) -> torch.Tensor:
    """Read an image. Local.

    Args:
        path: a file of any format that Pillow knows; grey or with colours, of any height and width.
        size: height and width of the result. Other shapes are cropped to a square in the middle,
            then made larger or smaller.

    Returns:
        uint8 [3, size, size], red, green and blue.

    Raises:
        DataError: it cannot be read, is not an image, or is cut off; the path is named.
    """
    content = read(path)
    try:
        return _fitted(_pixels(content), size)
    except Exception as error:  # a broken image can fail in any way
        raise _bad(path, error) from error


def read(path: str) -> bytes:
    """Return what an image file holds, undecoded. Local.

    Raises:
        DataError: it cannot be read; the path is named.
    """
    try:
        return files.read(path)
    except OSError as error:
        raise _bad(path, error) from error


def _bad(path: str, error: Exception) -> DataError:
    return DataError(
        f"{path} cannot be read as an image: {' '.join(str(error).split())[:200]}",
        needed="a whole image file",
        cure="put a good copy in its place, or remove it",
    )


def fill(
    paths: Sequence[str], into: torch.Tensor, cores: Iterable[int] | None = None
) -> Iterator[None]:
    """Decode images into their places, in several threads. Local.

    Args:
        paths: N files.
        into: uint8 [N, 3, S, S]; is written.
        cores: where the threads may run, one a core; by default where this process may.

    Yields:
        after every few images.

    Raises:
        DataError: of the first file that cannot be read.
    """
    where = set(cores or os.sched_getaffinity(0))
    threads = min(len(where), _THREADS)

    def one(first: int) -> None:
        for i in range(first, min(first + _CHUNK, len(paths))):
            into[i] = decode(paths[i], into.shape[-1])

    pool = ThreadPoolExecutor(
        threads, "lockstep-decode", initializer=os.sched_setaffinity, initargs=(0, where)
    )
    try:
        waiting: deque[Future[None]] = deque()
        for first in range(0, len(paths), _CHUNK):
            waiting.append(pool.submit(one, first))
            # In order, so that the error is always that of the first bad file.
            if len(waiting) > 2 * threads:
                waiting.popleft().result()
                yield
        for future in waiting:
            future.result()
            yield
    finally:
        pool.shutdown(cancel_futures=True)


def _pixels(content: bytes) -> torch.Tensor:
    """Return uint8 [3, H, W]."""
    if not content:
        raise ValueError("it is empty")
    with Image.open(io.BytesIO(content)) as picture:
        if picture.mode.startswith("I;16"):
            # Pillow would cut off what is brighter than 255, not scale it.
            grey = torch.from_numpy(np.asarray(picture).astype(np.int32) >> 8)
            return grey.to(torch.uint8).expand(3, -1, -1)
        return torch.from_numpy(np.array(picture.convert("RGB"))).permute(2, 0, 1)


def _fitted(image: torch.Tensor, size: int) -> torch.Tensor:
    height, width = image.shape[1:]
    if height == width == size:
        return image
    side = min(height, width)
    down, right = (height - side) // 2, (width - side) // 2
    square = image[None, :, down : down + side, right : right + side]
    return interpolate(square, (size, size), mode="bilinear", antialias=True)[0]
