"""CIFAR-10 as a check sees it: in which form is it there, and is it whole? Local; unpickles not."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

# MD5 sums of the files of the Python form, as Alex Krizhevsky's page distributes them.
_BATCHES = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}
_IMAGES = {"train": 50_000, "test": 10_000}


def find(directory: Path) -> Path | None:
    """Return where CIFAR-10 is in a directory, None if it is not there."""
    for path in (directory / "cifar-10-batches-py", directory / "cifar10-images"):
        if path.is_dir():
            return path
    return directory if all((directory / part).is_dir() for part in _IMAGES) else None


def fingerprint(directory: Path) -> str:
    """Return a few words that are the same for the same set.

    Raises:
        ValueError: a file is missing or not what it should be.
        OSError: one cannot be read.
    """
    place = find(directory)
    if place is None:
        raise ValueError("not there")
    return _batches(place) if place.name == "cifar-10-batches-py" else _pictures(place)


def _batches(place: Path) -> str:
    for name, wanted in _BATCHES.items():
        content = (place / name).read_bytes()
        found = hashlib.md5(content, usedforsecurity=False).hexdigest()
        if found != wanted:
            raise ValueError(f"{name} has the MD5 sum {found}, {wanted} is right")
    return "whole, 60000 images in 6 batches"


def _pictures(place: Path) -> str:
    """Count the pictures of a folder a class; their names, not their contents, are summed."""
    total = hashlib.sha256()
    for part, wanted in _IMAGES.items():
        names = []
        with os.scandir(place / part) as classes:
            for entry in classes:
                if entry.is_dir():
                    names += [f"{entry.name}/{name}" for name in os.listdir(entry.path)]
        if len(names) != wanted:
            raise ValueError(f"{len(names)} pictures in {place / part}, {wanted} are right")
        total.update("\n".join(sorted(names)).encode())
    return f"whole, 60000 pictures, names sum to {total.hexdigest()[:12]}"
