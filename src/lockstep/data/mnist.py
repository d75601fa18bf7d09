"""The whole MNIST set: fetched once, checked by checksum, read straight into tensors.

The files lie as torchvision's class MNIST leaves them, `DIRECTORY/MNIST/raw/NAME` or `NAME.gz`, and
in the IDX format: http://yann.lecun.com/exdb/mnist.
"""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import os
import socket
import tempfile
import zlib
from pathlib import Path

import torch

from lockstep.data.digits import digits
from lockstep.data.images import Images
from lockstep.errors import DataError
from lockstep.waiting import Patience, wait_until

# MD5 sums of the unpacked files of the original distribution.
CHECKSUMS = {
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}
# A download takes long: the others look for its end now and then.
_LAZY = Patience(spins=1, eager=0.0, share=0.05, longest=0.5)
# Seconds that a server may be silent.
_SILENCE = 30.0


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
        limit: seconds to wait for another process that downloads.

    Raises:
        DataError: the directory cannot be written, or the files not be downloaded.
    """
    if not _missing(directory):
        return
    raw = _raw(directory)
    try:
        raw.mkdir(parents=True, exist_ok=True)
        with (raw / ".lock").open("w") as lock:
            if not wait_until(lambda: _locked(lock.fileno()), limit, _LAZY):
                raise DataError(
                    f"another process has held {lock.name} for {limit:g} s",
                    needed="the download by that process to end",
                    cure="look for the process that holds it (fuser), or name another --data-dir",
                )
            if missing := _missing(directory):
                _download(raw, missing)
    except OSError as error:
        raise DataError(
            f"cannot write {raw}: {error}",
            needed="a directory that can be written, or one that holds MNIST already",
            cure="name it with --data-dir",
        ) from error


def _raw(directory: Path) -> Path:
    return directory / "MNIST" / "raw"


def _missing(directory: Path) -> list[str]:
    raw = _raw(directory)
    return [name for name in CHECKSUMS if not any(file.exists() for file in _places(raw, name))]


def _places(raw: Path, name: str) -> tuple[Path, Path]:
    return raw / name, raw / f"{name}.gz"


def _locked(file: int) -> bool:
    """Take the lock, which holds across hosts where the file system can do that; or say no."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def _download(raw: Path, names: list[str]) -> None:
    """Let torchvision fetch the files into a directory of our own, then move them into place."""
    # Not at the top: torchvision is slow to import and only needed here.
    from torchvision.datasets import MNIST

    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=raw) as beside:
        # torchvision sets no limit to the wait for an answer.
        before = socket.getdefaulttimeout()
        socket.setdefaulttimeout(_SILENCE)
        try:
            MNIST(beside, download=True)
        except Exception as error:
            raise DataError(
                f"MNIST cannot be downloaded to {raw}: {' '.join(str(error).split())[:300]}",
                needed="a way to " + " or ".join(MNIST.mirrors),
                cure="copy the four files into that directory, or use --data sample",
            ) from error
        finally:
            socket.setdefaulttimeout(before)
        for name in names:
            os.replace(_raw(Path(beside)) / name, raw / name)


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
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise _wrong(path, str(error)) from error
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if found != CHECKSUMS[name]:
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
