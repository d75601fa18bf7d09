"""A directory of images, each in a folder that is named for its class."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from lockstep.data.decode import SUFFIXES, fill, read
from lockstep.data.source import DEVIATION, MEAN, Part, Source
from lockstep.errors import DataError

PARTS = ("train", "test")
# Files that are looked into to compare the nodes, if the set is not decoded as a whole.
_PROBES = 64


@dataclass(frozen=True)
class Tree:
    """The image files of a directory.

    Attributes:
        root: the directory.
        classes: names of the folders, in alphabetical order.
        paths: of the images to train with and of those to test with, in alphabetical order.
        labels: int64 [N] each.
    """

    root: Path
    classes: tuple[str, ...]
    paths: tuple[list[str], list[str]]
    labels: tuple[torch.Tensor, torch.Tensor]

    def source(self, size: int, cores: Iterable[int]) -> Source:
        """Return a way to decode it all, to one size. Local."""
        train, test = (
            Part(labels, lambda into, paths=paths: fill(paths, into, cores))  # type: ignore[misc]
            for paths, labels in zip(self.paths, self.labels, strict=True)
        )
        return Source(size, self.classes, MEAN, DEVIATION, train, test)

    def fingerprint(self) -> int:
        """Return a number made of all names and of what is in 64 files. Local.

        To read more would take as long as an epoch.

        Raises:
            DataError: one of the files cannot be read.
        """
        paths = [path for part in self.paths for path in part]
        start = len(os.fspath(self.root))
        found = zlib.crc32("\n".join(path[start:] for path in paths).encode(errors="replace"))
        for path in paths[:: -(-len(paths) // _PROBES)]:
            found = zlib.crc32(read(path), found)
        return found


def scan(directory: Path) -> Tree:
    """List `DIRECTORY/train/CLASS/*` and `DIRECTORY/test/CLASS/*`. Local.

    Files that are not called like an image, and what begins with a dot, are passed over.

    Raises:
        DataError: a directory is missing or cannot be read, a class is empty, or the two parts have
            different classes.
    """
    folders = [_classes(directory / part) for part in PARTS]
    train, test = map(set, folders)
    if train != test:
        odd = [f"{PARTS[0]}/{name}" for name in sorted(train - test)]
        odd += [f"{PARTS[1]}/{name}" for name in sorted(test - train)]
        raise DataError(
            f"{directory} has classes in one part only: {', '.join(odd[:6])}",
            needed="the same folders in train and in test",
            cure="rename or remove them",
        )
    found: list[list[str]] = []
    labels = []
    for part in PARTS:
        names = [_images(directory / part / name) for name in folders[0]]
        found.append([path for paths in names for path in paths])
        counts = torch.tensor([len(paths) for paths in names])
        labels.append(torch.repeat_interleave(torch.arange(len(names)), counts))
    return Tree(directory, tuple(folders[0]), (found[0], found[1]), (labels[0], labels[1]))


def _classes(part: Path) -> list[str]:
    names = sorted(entry.name for entry in _entries(part) if entry.is_dir())
    if not names:
        raise DataError(f"{part} holds no folder", needed=_NEEDED, cure="name another --data-dir")
    return names


def _images(folder: Path) -> list[str]:
    # By name alone: a link that leads nowhere is an image that cannot be read, and is said so.
    paths = sorted(e.path for e in _entries(folder) if e.name.lower().endswith(SUFFIXES))
    if not paths:
        raise DataError(
            f"{folder} holds no image",
            needed=f"files that end in {' '.join(SUFFIXES)}",
            cure="put images there, or remove the folder in train and in test",
        )
    return paths


def _entries(directory: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            return [entry for entry in entries if not entry.name.startswith(".")]
    except OSError as error:
        raise DataError(
            f"{directory} cannot be read: {error.strerror}",
            needed=_NEEDED,
            cure="name the directory above train and test with --data-dir",
        ) from error


_NEEDED = "a folder for each class of images in train, and the same in test"
