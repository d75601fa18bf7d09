"""The whole MNIST set: fetched once, checked by checksum, read straight into tensors.

The files lie as torchvision's class MNIST leaves them, `DIRECTORY/MNIST/raw/NAME` or `NAME.gz`, and
in the IDX format: http://yann.lecun.com/exdb/mnist.
"""

from __future__ import annotations

import gzip
import os
import zlib
from pathlib import Path

import torch

from lockstep import files
from lockstep.data.digits import digits
from lockstep.data.download import beside, md5, once
from lockstep.data.images import Images
from lockstep.errors import DataError

# MD5 sums of the unpacked files of the original distribution.
CHECKSUMS = {
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}


def load(directory: Path) -> tuple[Images, Images]:
    """Return the 60,000 digits to train with and the 10,000 to test with. Local.

    Raises:
        DataError: a file is missing, truncated or not what its checksum says.
    """
    parts = [_idx(name, _checked(directory, name)) for name in CHECKSUMS]
    return _digits(parts[0], parts[1]), _digits(parts[2], parts[3])


def fetch(directory: Path, limit: float) -> None:
    """Download the files unless they are there; of several callers at a time, one does. Local.

    The files are written beside and renamed when they are whole. A file that is there already is
    never touched.

    Args:
        directory: see above; it is made if it is missing.
        limit: seconds to wait without any progress, also of another process that downloads.

    Raises:
        DataError: the directory cannot be written, or the files not be downloaded.
    """
    raw = _raw(directory)
    for _ in once(
        "MNIST", raw, lambda: _missing(directory), lambda names: _download(raw, names), limit
    ):
        pass


def _raw(directory: Path) -> Path:
    return directory / "MNIST" / "raw"


def _missing(directory: Path) -> list[str]:
    raw = _raw(directory)
    return [name for name in CHECKSUMS if not any(file.exists() for file in _places(raw, name))]


def _places(raw: Path, name: str) -> tuple[Path, Path]:
    return raw / name, raw / f"{name}.gz"


def _download(raw: Path, names: list[str]) -> None:
    """Let torchvision fetch the files into a directory of our own, then move them into place."""
    # Not at the top: torchvision is slow to import and only needed here.
    from torchvision.datasets import MNIST

    with beside(raw) as fresh:
        try:
            MNIST(fresh, download=True)
        except Exception as error:
            raise DataError(
                f"MNIST cannot be downloaded to {raw}: {' '.join(str(error).split())[:300]}",
                needed="a way to " + " or ".join(MNIST.mirrors),
                cure="copy the four files into that directory, or use --data sample",
            ) from error
        for name in names:
            os.replace(_raw(Path(fresh)) / name, raw / name)


def _checked(directory: Path, name: str) -> bytes:
    """Return what a file holds, unpacked."""
    raw = _raw(directory)
    path = next((file for file in _places(raw, name) if file.exists()), None)
    if path is None:
        raise DataError(
            f"{raw / name} is missing",
            needed=f"the four files of MNIST in {raw}, plain or gzipped",
            cure="copy them there, or name another --data-dir",
        )
    try:
        content = files.read(path)
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise _wrong(path, str(error)) from error
    if (found := md5(content)) != CHECKSUMS[name]:
        raise _wrong(path, f"{len(content)} bytes with the MD5 sum {found}", CHECKSUMS[name])
    return content


def _wrong(path: Path, what: str, needed: str = "") -> DataError:
    return DataError(
        f"{path} is damaged: {what}",
        needed=f"the file of the original distribution{needed and f', MD5 sum {needed}'}",
        cure=f"remove it, then it is downloaded again: rm {path}",
    )


def _idx(name: str, content: bytes) -> torch.Tensor:
    """Read an IDX file of bytes: two zeros, 8 for uint8, the rank, then each size in 4 bytes."""
    dimensions = content[3]
    sizes = [int.from_bytes(content[4 + 4 * i : 8 + 4 * i], "big") for i in range(dimensions)]
    values = torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=4 + 4 * dimensions)
    return values.view(sizes)


def _digits(images: torch.Tensor, labels: torch.Tensor) -> Images:
    return digits(images.unsqueeze(1), labels.long())
