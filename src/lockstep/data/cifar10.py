"""CIFAR-10 in the batches of its authors, as torchvision's class CIFAR10 leaves them.

The files lie in `DIRECTORY/cifar-10-batches-py/`. Each is a pickle; what is read here is checked by
checksum first, and then by a reader that knows dicts, lists, numbers, text and arrays, and can call
nothing else. A set of one's own in the same layout brings its checksums along, in a file MD5SUMS
beside the batches, as `md5sum *` prints them. Format: https://www.cs.toronto.edu/~kriz/cifar.html.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lockstep import files
from lockstep.data.download import beside, md5, once
from lockstep.data.source import DEVIATION, MEAN, Part, Source, of_tensors
from lockstep.errors import DataError

FOLDER, META, OWN = "cifar-10-batches-py", "batches.meta", "MD5SUMS"
# MD5 sums of the files of the original distribution.
CHECKSUMS = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
    "batches.meta": "5ff9c542aee3614f3951f8cda6e48888",
}
_SIZE = 32


def fetch(directory: Path, limit: float) -> Iterator[None]:
    """Download the files unless they are there; see `download.once`. Local."""
    folder = directory / FOLDER
    yield from once(
        "CIFAR-10",
        folder,
        lambda: [name for name in checksums(directory) if not (folder / name).exists()],
        lambda names: _download(directory, names),
        limit,
    )


def checksums(directory: Path) -> dict[str, str]:
    """Return the files of the set and their MD5 sums. Local.

    Raises:
        DataError: the set has a file MD5SUMS, which cannot be read.
    """
    own = directory / FOLDER / OWN
    if not own.exists():
        return CHECKSUMS
    try:
        pairs = [line.split() for line in own.read_text().splitlines() if line.strip()]
        found = {name.lstrip("*"): value for value, name in pairs if name.lstrip("*") != OWN}
    except (OSError, ValueError) as error:
        raise _wrong(own, str(error), "lines of a sum and a name, as `md5sum *` prints") from error
    train = any(name.startswith("data_batch") for name in found)
    if not train or not {"test_batch", META} <= set(found):
        raise _wrong(own, f"it lists {sorted(found)}", f"data_batch_1 …, test_batch and {META}")
    return found


def load(directory: Path) -> Source:
    """Return the 50,000 pictures to train with and the 10,000 to test with. Local.

    Raises:
        DataError: a file is missing, damaged, or not what its checksum says.
    """
    sums = checksums(directory)
    folder = directory / FOLDER
    found = {name: _read(folder / name, expected) for name, expected in sums.items()}
    names = found.pop(META).get("label_names")
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        raise _wrong(folder / META, "it names no classes", "a list label_names")
    test = _part(folder, {"test_batch": found.pop("test_batch")}, len(names))
    train = _part(folder, dict(sorted(found.items())), len(names))
    return Source(_SIZE, tuple(names), MEAN, DEVIATION, train, test)


def _read(path: Path, expected: str) -> dict[str, Any]:
    try:
        content = files.read(path)
    except FileNotFoundError as error:
        raise DataError(
            f"{path} is missing",
            needed=f"the batches of CIFAR-10 for Python in {path.parent}",
            cure="unpack cifar-10-python.tar.gz there, or name another --data-dir",
        ) from error
    except OSError as error:
        raise _wrong(path, str(error), "a file that can be read") from error
    if (sum_ := md5(content)) != expected:
        raise _wrong(path, f"{len(content)} bytes with the MD5 sum {sum_}", f"MD5 sum {expected}")
    try:
        found = _Reader(io.BytesIO(content), encoding="latin1").load()
    except Exception as error:  # a pickle can fail in any way
        raise _wrong(path, f"it cannot be unpacked: {error}", "a batch of CIFAR-10") from error
    if not isinstance(found, dict):
        raise _wrong(path, f"it holds a {type(found).__name__}", "a batch of CIFAR-10")
    return found


class _Reader(pickle.Unpickler):
    """Reads pickles of plain things and of arrays; refuses all that would call something else."""

    _KNOWN = ("multiarray _reconstruct", "numpy ndarray", "numpy dtype", "_codecs encode")

    def find_class(self, module: str, name: str) -> Any:
        plain = module.removeprefix("numpy._core.").removeprefix("numpy.core.")
        if f"{plain} {name}" not in self._KNOWN:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        if name == "_reconstruct":
            return np.empty(0).__reduce__()[0]
        return super().find_class(module, name)


def _part(folder: Path, batches: dict[str, dict[str, Any]], classes: int) -> Part:
    images, labels = [], []
    for name, batch in batches.items():
        data, marks = batch.get("data"), batch.get("labels")
        if not (isinstance(data, np.ndarray) and data.dtype == np.uint8 and data.ndim == 2):
            raise _wrong(folder / name, "it has no data", "uint8 [n, 3072]")
        if data.shape[1] != 3 * _SIZE**2 or not isinstance(marks, list) or len(marks) != len(data):
            raise _wrong(folder / name, f"data {list(data.shape)}", "[n, 3072] and n labels")
        if not all(isinstance(it, int) and 0 <= it < classes for it in marks):
            raise _wrong(folder / name, "a label that is no class", f"0 to {classes - 1}")
        images.append(torch.from_numpy(data.copy()).view(-1, 3, _SIZE, _SIZE))
        labels.append(torch.tensor(marks, dtype=torch.int64))
    return of_tensors(torch.cat(images), torch.cat(labels))


def _download(directory: Path, names: list[str]) -> None:
    """Let torchvision fetch the archive into a directory of our own, then move the files."""
    # Not at the top: torchvision is slow to import and only needed here.
    from torchvision.datasets import CIFAR10

    folder = directory / FOLDER
    with beside(folder) as fresh:
        archive = directory / CIFAR10.filename
        if archive.exists():
            if (found := md5(archive.read_bytes())) != CIFAR10.tgz_md5:
                raise _wrong(archive, f"MD5 sum {found}", f"MD5 sum {CIFAR10.tgz_md5}")
            os.symlink(archive.resolve(), Path(fresh) / archive.name)
        try:
            CIFAR10(fresh, download=True)
        except Exception as error:
            raise DataError(
                f"CIFAR-10 cannot be downloaded to {folder}: {' '.join(str(error).split())[:300]}",
                needed=f"a way to {CIFAR10.url}, MD5 sum {CIFAR10.tgz_md5}",
                cure=f"copy {archive.name} to {directory}, or use --data imagefolder or sample",
            ) from error
        for name in names:
            os.replace(Path(fresh) / FOLDER / name, folder / name)


def _wrong(path: Path, what: str, needed: str) -> DataError:
    return DataError(
        f"{path} is damaged: {what}",
        needed=needed,
        cure="fetch it again; a file that is removed is downloaded",
    )
