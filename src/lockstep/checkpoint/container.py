"""The file of a checkpoint: what torch.save writes, and after it a digest of all its bytes.

`torch.load` opens such a file as it is. The last 48 bytes are a mark, the number of bytes before
them, and their SHA-256, so that a file that was cut off or changed at any byte is known for what
it is. Everything here is Local.
"""

from __future__ import annotations

import hashlib
import io
import struct
from pathlib import Path
from typing import Any, BinaryIO

import torch

from lockstep import files
from lockstep.errors import CheckpointError

_MARK = b"lockstep"
_END = struct.Struct("<8sQ32s")


class Damaged(CheckpointError):
    """The file is not what was written."""


class _Sink:
    """Takes what torch.save writes; passes it on, counts and digests it.

    An error is kept for later: one that is raised inside of torch's writer turns into a riddle.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.size, self.digest = file, 0, hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        if self.error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self.error = error
            self.digest.update(data)
            self.size += len(data)
        return len(data)

    def flush(self) -> None:
        """Do nothing: the whole file is flushed at its end."""


def write(file: BinaryIO, content: dict[str, Any]) -> None:
    """Write a checkpoint.

    Args:
        file: open for writing, at its start.
        content: tensors on the CPU, numbers, texts, and containers of them.

    Raises:
        OSError: the disk is full, or the like.
    """
    sink = _Sink(file)
    torch.save(content, sink)  # type: ignore[arg-type]  # write and flush are all that it calls
    if sink.error is not None:
        raise sink.error
    file.write(_END.pack(_MARK, sink.size, sink.digest.digest()))


def read(path: Path) -> bytes:
    """Return the bytes of a checkpoint that is whole.

    Raises:
        Damaged: it is not; says in which way.
        OSError: it cannot be read.
    """
    try:
        data = files.read(path)
    except files.NotAFile as error:
        raise Damaged(f"{path}: {error.strerror}") from error
    size = len(data) - _END.size
    if size < 0:
        raise Damaged(f"{path}: cut off after {len(data)} bytes")
    mark, written, digest = _END.unpack_from(data, size)
    if mark != _MARK:
        raise Damaged(f"{path}: cut off after {len(data)} bytes, or no checkpoint of Lockstep")
    if written != size:
        raise Damaged(f"{path}: {size} bytes of {written}")
    if hashlib.sha256(memoryview(data)[:size]).digest() != digest:
        raise Damaged(f"{path}: its bytes were changed after it was written (wrong digest)")
    return data


def decode(data: bytes, source: str) -> dict[str, Any]:
    """Return the content of a checkpoint, with tensors on the CPU. Runs no code from the file.

    Args:
        data: what `read` returned.
        source: its name, for the error.

    Raises:
        Damaged: it holds something else than a checkpoint.
    """
    try:
        content = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # torch and pickle raise whatever they like
        raise Damaged(
            f"{source}: cannot be decoded: {' '.join(str(error).split())[:200]}"
        ) from error
    if not isinstance(content, dict) or "format" not in content:
        raise Damaged(f"{source}: no checkpoint of Lockstep")
    return content
