"""How a run gets its directory: a new one, or the one it had before. Everything here is Local."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from lockstep import files
from lockstep.errors import SettingsError
from lockstep.lock import DirectoryLock

DONE, METRICS, RESULTS, CURVES = "DONE", "metrics.jsonl", "results.csv", "curves.png"
_CURE = "wait for that job, or name another directory with --run"


def make(parent: Path, name: str) -> Path:
    """Make a new directory `PARENT/NAME-TIME`.

    Raises:
        SettingsError: it cannot be made.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S")
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for number in range(1, 1000):
            path = parent / f"{name}-{stamp}{f'-{number}' if number > 1 else ''}"
            try:
                path.mkdir()
            except FileExistsError:
                continue
            return path
    except OSError as error:
        reason = str(error)
    else:
        reason = f"{parent}/{name}-{stamp}-1 to -999 are there already"
    raise SettingsError(
        f"cannot make a directory for this run in {parent}: {reason}",
        needed="a directory that the root may write to",
        cure="name another with --run-dir",
    )


def take(path: Path) -> DirectoryLock:
    """Make the directory that was named, or take it as an earlier start has left it.

    Returns:
        the lock that keeps it for this job.

    Raises:
        SettingsError: a run has come to its end in it, or others have put such files there.
        StorageError: it cannot be made or written to, or another job uses it.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise files.failure(error, "make the run directory", path) from error
    lock = DirectoryLock(path, _CURE)
    try:
        refuse(path)
        if lock.held:
            files.clean(path)
    except OSError as error:
        lock.release()
        raise files.failure(error, "use the run directory", path) from error
    except SettingsError:
        lock.release()
        raise
    return lock


def refuse(path: Path) -> None:
    """Refuse a directory in which nothing may be written any more.

    Raises:
        SettingsError: says why.
    """
    if (path / DONE).exists():
        raise SettingsError(
            f"the run in {path} has come to its end: DONE is there",
            needed="a directory for this run alone",
            cure="name another with --run, or remove DONE to go on from its last checkpoint",
        )
    others = [name for name in (METRICS, RESULTS, CURVES) if (path / name).exists()]
    if others and not (path / "settings.json").exists():
        raise SettingsError(
            f"{path} holds {', '.join(others)}, but no settings.json: no run has made it",
            needed="a directory of a run, or one without such files",
            cure="name another with --run",
        )


def note_settings(path: Path, noted: dict[str, Any]) -> None:
    """Write settings.json; at a restart settings-2.json and so on: none is overwritten.

    Raises:
        StorageError: it cannot be written.
    """
    names = ["settings.json", *(f"settings-{number}.json" for number in range(2, 100_000))]
    free = next(path / name for name in names if not (path / name).exists())
    try:
        files.write_text(free, json.dumps(noted, indent=1, default=str) + "\n")
    except OSError as error:
        raise files.failure(error, "write", free) from error
