"""What a rank runs that `lockstep.spawn` has started: ``python -m lockstep.spawned``."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pickle
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import SpawnError
from lockstep.launch import run
from lockstep.spawn import Failure
from lockstep.world import discover


def main(argv: Sequence[str] | None = None) -> None:
    """Read the function, call it, write what it returns or raises. Collective."""
    del argv
    directory = Path(os.environ.pop("LOCKSTEP_SPAWN"))
    _require_private(directory)
    sys.path[:] = json.loads((directory / "path.json").read_text())
    world = discover()
    try:
        fn, args = pickle.loads((directory / "call").read_bytes())
        result = _pickled(fn(*args))
    except BaseException as error:
        failure = Failure(time.monotonic(), _shown(error), _picklable(error))
        _write(directory / f"result-{world.rank}", pickle.dumps(failure))
        raise
    _write(directory / f"result-{world.rank}", result)


def _require_private(directory: Path) -> None:
    """Refuse a directory that another user could have put a pickle into. Local."""
    found = directory.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise SpawnError(
            f"{directory} is not this user's alone",
            needed="the directory that lockstep.spawn has made",
            cure="start ranks by lockstep.spawn, not by lockstep.spawned",
        )


def _pickled(result: Any) -> bytes:
    with contextlib.suppress(ImportError):
        return bytes(importlib.import_module("cloudpickle").dumps(result))
    return pickle.dumps(result)


def _picklable(error: BaseException) -> bytes:
    """Return the exception as a pickle, nothing if it or its copy cannot be made. Local."""
    try:
        content = _pickled(error)
        pickle.loads(content)
    except Exception:
        return b""
    return content


def _shown(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def _write(path: Path, content: bytes) -> None:
    beside = path.with_suffix(".new")
    beside.write_bytes(content)
    beside.rename(path)


if __name__ == "__main__":
    run(main)
