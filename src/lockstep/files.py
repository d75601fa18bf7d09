"""Files that are there whole or not at all: written beside, flushed to disk, renamed. All Local."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from lockstep.errors import StorageError

# What a file is called until it is whole; nothing else is ever called so.
_PART = re.compile(r"\.[A-Za-z0-9._-]+\.[0-9a-f]{16}\.part")
_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def fresh(target: Path, mode: int = 0o600) -> Iterator[BinaryIO]:
    """Write a file that takes its name, and the place of an older one, only when it is on disk.

    Args:
        target: its name.
        mode: its permissions, before the umask.

    Yields:
        the open file, under a name that was never used before.

    Raises:
        OSError: it cannot be written; then an older file of that name is as it was.
    """
    part = target.with_name(f".{target.name}.{secrets.token_hex(8)}.part")
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(part, flags, mode)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, target)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
    sync_directory(target.parent)


class NotAFile(OSError):
    """It is a pipe, a device or a directory: to read it might never end."""


def read(path: str | Path) -> bytes:
    """Return what a file holds.

    Raises:
        OSError: it cannot be read; NotAFile at once, and without waiting for a writer.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise NotAFile(errno.EINVAL, "it is a pipe, a device or a directory, no file", str(path))
    with os.fdopen(handle, "rb") as file:
        return file.read()


def write_text(target: Path, text: str, mode: int = 0o666) -> None:
    """Write a small file as `fresh` does."""
    with fresh(target, mode) as file:
        file.write(text.encode())


def sync_directory(directory: Path) -> None:
    """Wait until the names in a directory are on disk."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    except OSError as error:
        # some network file systems have no such call: there a rename is on the server at once
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(handle)


def clean(directory: Path) -> int:
    """Remove what writers that were killed have left; only where no other writer can be at work.

    Returns:
        how many files that were.
    """
    found = 0
    for entry in os.scandir(directory):
        if _PART.fullmatch(entry.name) and stat.S_ISREG(entry.stat(follow_symlinks=False).st_mode):
            os.unlink(entry.path)
            found += 1
    return found


def failure(error: OSError, what: str, path: Path) -> StorageError:
    """Say why a file cannot be read or written, and what to do.

    Args:
        error: what the operating system said.
        what: such as "write the checkpoint".
        path: of the file or directory.
    """
    where = path.parent
    with contextlib.suppress(OSError):  # what could not be used cannot always be looked at
        where = path if path.is_dir() else where
    cure = f"`ls -ld {where}`: does it belong to you, is it mounted read-only?"
    if error.errno in _FULL:
        cure = f"make room: `df -h {where}`, `df -i {where}`, and your quota"
    return StorageError(
        f"cannot {what} {path}: {error.strerror or error}",
        needed="a directory that the root may write to, with room",
        cure=cure,
    )
