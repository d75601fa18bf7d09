"""Fetch files once, however many processes want them at the same time."""

from __future__ import annotations

import fcntl
import hashlib
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from lockstep.errors import DataError
from lockstep.waiting import Patience, wait_until

# A download takes long: the others look for its end now and then.
_LAZY = Patience(spins=1, eager=0.0, share=0.05, longest=0.5)
# Seconds that a server may be silent; and between two pieces of a wait.
_SILENCE, _PIECE = 30.0, 0.5


def once(
    what: str,
    place: Path,
    missing: Callable[[], list[str]],
    download: Callable[[list[str]], None],
    limit: float,
) -> Iterator[None]:
    """Fetch what is missing; of several callers at a time, also on other hosts, one does. Local.

    Nothing is written if nothing is missing.

    Args:
        what: name of the data set.
        place: directory for it; it is made if it is missing.
        missing: returns the names of the files that are not there.
        download: fetches them into a directory of its own in place, and renames them.
        limit: seconds without a byte more in the place, after which a wait is an error.

    Yields:
        now and then, while it waits.

    Raises:
        DataError: the place cannot be written, the download fails, or nothing goes on any more.
    """
    if not missing():
        return
    try:
        yield from _once(place, missing, download, limit)
    except OSError as error:
        raise DataError(
            f"cannot write {place}: {error}",
            needed=f"a directory that can be written, or one that holds {what} already",
            cure="name it with --data-dir",
        ) from error


def _once(
    place: Path,
    missing: Callable[[], list[str]],
    download: Callable[[list[str]], None],
    limit: float,
) -> Iterator[None]:
    place.mkdir(parents=True, exist_ok=True)
    with (place / ".lock").open("w") as lock:
        yield from _pieces(place, lambda: _locked(lock.fileno()), limit, _held(lock.name, limit))
        if names := missing():
            yield from _in_a_thread(place, lambda: download(names), limit)


def beside(place: Path) -> tempfile.TemporaryDirectory[str]:
    """Return a fresh directory in the place, to fetch into. Local."""
    return tempfile.TemporaryDirectory(prefix=".fetch-", dir=place)


def md5(content: bytes) -> str:
    """Return the MD5 sum, which these data sets were published with. Local."""
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def _locked(file: int) -> bool:
    """Take the lock, which holds across hosts where the file system can do that; or say no."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def _held(lock: str, limit: float) -> DataError:
    return DataError(
        f"another process has held {lock} for {limit:g} s without any progress",
        needed="the download by that process to end",
        cure="look for the process that holds it (fuser), or name another --data-dir",
    )


def _pieces(
    place: Path, ready: Callable[[], bool], limit: float, late: DataError
) -> Iterator[None]:
    """Wait as long as the place grows, and no longer than the limit beyond that."""
    size, since = _size(place), time.monotonic()
    while not wait_until(ready, min(_PIECE, limit), _LAZY):
        yield
        if (now := _size(place)) != size:
            size, since = now, time.monotonic()
        elif time.monotonic() - since > limit:
            raise late


def _size(place: Path) -> int:
    """Return how many bytes the place holds, those of unfinished downloads too."""
    total = 0
    for directory, _, names in os.walk(place):
        for name in names:
            try:
                total += os.stat(os.path.join(directory, name)).st_size
            except OSError:
                continue  # it has just been renamed
    return total


def _in_a_thread(place: Path, work: Callable[[], None], limit: float) -> Iterator[None]:
    failures: list[BaseException] = []

    def call() -> None:
        # torchvision sets no limit to the wait for an answer.
        before = socket.getdefaulttimeout()
        socket.setdefaulttimeout(_SILENCE)
        try:
            work()
        except BaseException as error:
            failures.append(error)
        finally:
            socket.setdefaulttimeout(before)

    thread = threading.Thread(target=call, name="lockstep-download", daemon=True)
    thread.start()
    late = DataError(
        f"the download to {place} has not gone on for {limit:g} s",
        needed="a server that sends",
        cure="try again later, or copy the files there by hand",
    )
    yield from _pieces(place, lambda: not thread.is_alive(), limit, late)
    thread.join()
    if failures:
        raise failures[0]
