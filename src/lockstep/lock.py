"""One job at a time in a directory: a lock that the kernel gives back when its holder dies."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

from lockstep.errors import StorageError
from lockstep.files import failure
from lockstep.launcher import job_name
from lockstep.waiting import Patience, wait_until

_NAME = ".lock"
# Seconds. A job on this host that is just ending; and one whose host may have died: its lock is
# given back by the file server, after a lease of a minute or more.
_HERE, _ELSEWHERE = 5.0, 120.0
_PATIENCE = Patience(spins=1, eager=0.0, share=0.1, longest=0.25)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)


class DirectoryLock:
    """Holds a directory for this process until `release`, or the end of the process. Local.

    Args:
        directory: in which the file `.lock` is made; the file stays.
        cure: what to do if another job holds it.

    Attributes:
        held: False where the file system has no locks; a line on stderr says so.

    Raises:
        StorageError: another process holds it; host, process and job are named.
    """

    def __init__(self, directory: Path, cure: str) -> None:
        path = directory / _NAME
        self.held = False
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._handle = os.open(path, flags, 0o600)
        except OSError as error:
            raise failure(error, "lock", path) from error
        try:
            if not wait_until(self._taken, _limit(self._holder()), _PATIENCE):
                raise self._refused(directory, cure)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(self._handle)
                raise failure(error, "lock", path) from error
            print(f"{directory}: no locks here; see that one job uses it", file=sys.stderr)
        except BaseException:
            os.close(self._handle)
            raise
        if self.held:
            self._sign()

    def release(self) -> None:
        """Give the directory back; a second call does nothing."""
        if self._handle >= 0:
            os.close(self._handle)
        self._handle, self.held = -1, False

    def _taken(self) -> bool:
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        self.held = True
        return True

    def _holder(self) -> dict[str, Any]:
        """Return what the last holder wrote down, as far as it can be read."""
        with contextlib.suppress(OSError, ValueError):
            found = json.loads(os.pread(self._handle, 4096, 0))
            if isinstance(found, dict):
                return found
        return {}

    def _sign(self) -> None:
        holder = {"host": socket.gethostname(), "pid": os.getpid(), "job": job_name()}
        text = json.dumps({**holder, "since": time.strftime("%Y-%m-%dT%H:%M:%S%z")})
        # only for the message that another job prints: a full disk must not matter here
        with contextlib.suppress(OSError):
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, text.encode(), 0)

    def _refused(self, directory: Path, cure: str) -> StorageError:
        who = self._holder()
        name = "process {pid} on {host} (job {job}, since {since})".format(
            **{key: who.get(key, "?") for key in ("pid", "host", "job", "since")}
        )
        return StorageError(
            f"{directory} is in use by {name}", needed="one job at a time in it", cure=cure
        )


def _limit(holder: dict[str, Any]) -> float:
    """Return how long to wait: not long for a job that is plainly alive or on this host."""
    return _HERE if holder.get("host") in (None, socket.gethostname()) else _ELSEWHERE
