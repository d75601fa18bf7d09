"""A line to one host: the probe, started there by ssh, and questions to it with a limit each."""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import shlex
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from lockstep.hosts import probe

_SOURCE = Path(probe.__file__)
# The first lines that a host answers, whatever its login shell prints before them.
_MARK = "lockstep-hosts"
_OPTIONS = (*probe.SSH_OPTIONS, "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=2")
# What ssh says, in a part that all its versions have, and what kind of trouble that is.
_RIDDLES = (
    ("could not resolve hostname", "name"),
    ("permission denied", "key"),
    ("too many authentication failures", "key"),
    ("host key verification failed", "host key"),
    ("identification has changed", "host key"),
    ("connection refused", "sshd"),
    ("during banner exchange", "banner"),
    ("connection timed out", "unreachable"),
    ("operation timed out", "unreachable"),
    ("no route to host", "unreachable"),
    ("network is unreachable", "unreachable"),
)


class LinkError(Exception):
    """A host does not answer as it should.

    Attributes:
        kind: name, key, host key, sshd, banner, unreachable, interpreter, silent or other.
        said: the words of ssh or of the host's shell.
        login: user id, user and host name, where the host was reached; otherwise empty.
    """

    def __init__(self, kind: str, said: str, login: tuple[str, ...] = ()) -> None:
        self.kind, self.said, self.login = kind, said, login
        super().__init__(f"{kind}: {said}")


def kind_of(said: str) -> str:
    """Return what kind of trouble ssh speaks of. Local."""
    text = said.lower()
    return next((kind for words, kind in _RIDDLES if words in text), "other")


def is_here(name: str) -> bool:
    """Say whether a name is this machine's own, so that no ssh is needed. Local."""
    mine = socket.gethostname()
    return name in ("localhost", "127.0.0.1", mine, mine.partition(".")[0])


class Link:
    """The probe on one host.

    Args:
        name: a host's name that `hostfile.is_name` has accepted.
        python: path of the interpreter there.
        local: run it on this machine, without ssh.
    """

    def __init__(self, name: str, python: str, local: bool = False) -> None:
        self.name = name
        source = _SOURCE.read_bytes()
        start = (
            f"import sys; del sys.path[:1]; exec(compile(sys.stdin.buffer.read({len(source)}), "
            "'lockstep-probe', 'exec'))"
        )
        # simple enough for every login shell
        words = f"echo {_MARK}; id -u; id -un; uname -n; "
        words += f"exec {shlex.quote(python)} -c {shlex.quote(start)}"
        command = ["sh", "-c", words] if local else ["ssh", *_OPTIONS, "--", name, words]
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the link
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, bufsize=0
        )
        self._heard = b""
        self.login: tuple[str, ...] = ()
        self._unsent = source

    def greet(self, seconds: float) -> None:
        """Wait for the host to say who it is. Local, with a limit.

        Raises:
            LinkError: it cannot be reached, or lets nobody in.
        """
        end = time.monotonic() + seconds
        while self._line(end) != _MARK:
            pass
        self.login = tuple(self._line(end) for _ in range(3))

    def ask(self, question: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Return the answer to a question. Local, with a limit.

        Raises:
            LinkError: it did not come.
        """
        end = time.monotonic() + seconds
        self._send(json.dumps(question).encode() + b"\n", end)
        while True:
            with contextlib.suppress(ValueError):  # something else on that host prints, too
                answer = json.loads(self._line(end))
                if isinstance(answer, dict):
                    return answer

    def close(self) -> None:
        """End the probe. Local; waits for a moment at most."""
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(3.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()

    def _send(self, data: bytes, end: float) -> None:
        assert self._process.stdin is not None
        data, self._unsent = self._unsent + data, b""
        handle = self._process.stdin.fileno()
        os.set_blocking(handle, False)
        with selectors.DefaultSelector() as selector:
            selector.register(handle, selectors.EVENT_WRITE)
            while data:
                if not selector.select(max(0.0, end - time.monotonic())):
                    raise self._trouble("silent")
                try:
                    data = data[os.write(handle, data) :]
                except BrokenPipeError:
                    raise self._trouble("gone") from None

    def _line(self, end: float) -> str:
        """Return the next line of the host."""
        assert self._process.stdout is not None
        handle = self._process.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(handle, selectors.EVENT_READ)
            while b"\n" not in self._heard:
                if not selector.select(max(0.0, end - time.monotonic())):
                    raise self._trouble("silent")
                part = os.read(handle, 65536)
                if not part:
                    raise self._trouble("gone")
                self._heard += part
        line, _, self._heard = self._heard.partition(b"\n")
        return line.decode(errors="replace").strip()

    def _trouble(self, how: str) -> LinkError:
        """Say why there was no answer, from what ssh or the shell has printed."""
        code = None
        if how == "gone":
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(2.0)
        self._errors.seek(0)
        text = self._errors.read(100_000).decode(errors="replace")
        lines = [re.sub(r"[^ -~]", "", line).strip() for line in text.splitlines()]
        lines = [line for line in lines if line]
        said = " / ".join(lines[-2:])[:300]
        if code in (126, 127) and self.login:
            return LinkError("interpreter", said or f"code {code}", self.login)
        if self.login:
            kind = "silent" if how == "silent" else "other"
            return LinkError(kind, said or "no answer", self.login)
        if how == "silent":
            return LinkError(kind_of(said) if said else "silent", said or "no answer")
        return LinkError(kind_of(said), said or f"ssh ended with code {code}")
