"""Where the smoke test writes: a directory in which nothing older is lost. Local, on the root."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from lockstep.errors import SettingsError
from lockstep.metrics import DONE, opening
from lockstep.rendezvous.agree import limited

JSON, PAGE = "smoke.json", "smoke.html"
# Seconds for one request to a file system that may hang.
_ANSWER = 10.0


def fresh_directory(parent: Path) -> Path | None:
    """Make a new directory for this run; say so and return None if that cannot be."""
    return _attempt(lambda: opening.make(parent, "smoke"), parent)


def kept_directory(path: Path) -> Path | None:
    """Make this very directory, or keep it; what an earlier run has left gets other names."""

    def make() -> Path:
        path.mkdir(parents=True, exist_ok=True)
        for name in (JSON, PAGE, DONE):
            if (path / name).exists():
                number = 1
                while (path / f"{name}.{number}").exists():
                    number += 1
                os.rename(path / name, path / f"{name}.{number}")
        return path

    return _attempt(make, path)


def write(directory: Path, name: str, text: str) -> bool:
    """Write a file beside and rename it; say so and return False if that cannot be."""
    try:
        limited(lambda: _replace(directory, name, text), _ANSWER)
    except OSError as error:
        sys.stderr.write(f"lockstep: cannot write {directory / name}: {error}\n")
        return False
    return True


def _attempt(make: Callable[[], Path], where: Path) -> Path | None:
    try:
        return limited(make, _ANSWER)
    except (OSError, SettingsError) as error:
        found = f"cannot make a directory for this run in {where}: {error}"
        sys.stderr.write(
            f"lockstep: {error.found if isinstance(error, SettingsError) else found}\n"
            "  needed: a directory that the root may write to; the results are printed only\n"
            "  to do:  name another with --run-dir\n"
        )
        return None


def _replace(directory: Path, name: str, text: str) -> None:
    handle, beside = tempfile.mkstemp(prefix=f".{name}-", dir=directory)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.chmod(beside, 0o644)
        os.replace(beside, directory / name)
    except BaseException:
        os.unlink(beside)
        raise
