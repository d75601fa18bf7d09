"""CIFAR-10 as a check sees it: in which form is it there, and is it whole? Local; unpickles not."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from lockstep.data import cifar10

_IMAGES = {"train": 50_000, "test": 10_000}


def find(directory: Path) -> Path | None:
    """Return where CIFAR-10 is in a directory, None if it is not there."""
    for path in (directory / cifar10.FOLDER, directory / "cifar10-images"):
        if path.is_dir():
            return path
    return directory if all((directory / part).is_dir() for part in _IMAGES) else None


def fingerprint(directory: Path) -> str:
    """Return a few words that are the same for the same set.

    Raises:
        ValueError: a file is missing or not what it should be; DataError: so is MD5SUMS.
        OSError: one cannot be read.
    """
    place = find(directory)
    if place is None:
        raise ValueError("not there")
    return _batches(place) if place.name == cifar10.FOLDER else _pictures(place)


def _batches(place: Path) -> str:
    sums = cifar10.checksums(place.parent)
    for name, wanted in sums.items():
        content = (place / name).read_bytes()
        found = hashlib.md5(content, usedforsecurity=False).hexdigest()
        if found != wanted:
            raise ValueError(f"{name} has the MD5 sum {found}, {wanted} is right")
    own = "" if sums == cifar10.CHECKSUMS else ", by its own MD5SUMS"
    return f"whole, {len(sums)} files{own}"


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
