"""Messages between the watchers of the nodes and the root: a line of JSON each, over TCP."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

# A watcher that does not take a message within this time is as good as silent.
SEND = 1.0
_PART = 2**16


class Channel:
    """One connection. All methods are Local.

    Args:
        connection: connected.

    Attributes:
        open: the other end is there, as far as is known.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._socket.settimeout(SEND)
        self._rest = b""
        self.open = True

    def fileno(self) -> int:
        """Return the descriptor, for selectors."""
        return self._socket.fileno()

    def send(self, **message: Any) -> None:
        """Send a message, or find that the other end is gone."""
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self.open = False

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that have come; call it when the descriptor is readable."""
        try:
            part = self._socket.recv(_PART, socket.MSG_DONTWAIT)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError:
            part = b""
        if not part:
            self.open = False
            return []
        *lines, self._rest = (self._rest + part).split(b"\n")
        messages = []
        for line in lines:
            # Who speaks something else has no business here.
            with contextlib.suppress(ValueError):
                message = json.loads(line)
                if isinstance(message, dict):
                    messages.append(message)
        return messages

    def close(self) -> None:
        """End the connection."""
        self.open = False
        self._socket.close()
