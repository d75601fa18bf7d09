"""A disk that gets full: a small file system in memory, mounted for as long as a test takes."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


def cannot_mount() -> str:
    """Say why no file system can be mounted here, or nothing if one can."""
    return "" if os.geteuid() == 0 else "mounting a small file system needs root"


@contextlib.contextmanager
def small_disk(path: Path, kilobytes: int) -> Iterator[Path]:
    """Mount an empty file system of so many kilobytes; skip the test where that cannot be."""
    if reason := cannot_mount():
        pytest.skip(reason)
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "lockstep-test", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], timeout=30, check=True)
