"""The compiled all-reduce of `_kernel.c`, loaded by ctypes if the package's build could make it."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from collections.abc import Sequence
from ctypes import c_int, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from pathlib import Path
from typing import Any

import torch

from lockstep.errors import LockstepError

DONE, DIFFERENT = -1, -2
DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
# The most ranks of a node that it serves.
LARGEST_TEAM = 64
# A sum of so many bytes all ranks add up for themselves; a longer one is cut into slices.
SMALL = 16 * 2**10
_VERSION = 4


class Team(ctypes.Structure):
    """The C struct team: where the slots of the ranks lie, and how to wait."""

    _fields_ = (
        ("slots", c_void_p),
        ("size", c_int32),
        ("rank", c_int32),
        ("spins", c_int32),
        ("yields", c_int32),
        ("nanoseconds", c_int64),
    )


@functools.cache
def library() -> Any:
    """Return the compiled library, None if there is none here. Local.

    LOCKSTEP_KERNEL=0 leaves it out.
    """
    if os.environ.get("LOCKSTEP_KERNEL", "1") == "0":
        return None
    here = Path(__file__).parent
    for path in sorted(here.glob("_kernel*.so")):
        try:
            loaded = ctypes.CDLL(str(path))
        except OSError:
            continue  # built for another machine that shares this directory
        return _declare(loaded)
    return None


def require(troubles: Sequence[str]) -> None:
    """Raise what kept a rank from loading the library, if something did. Local.

    Args:
        troubles: of all ranks, "" for none; so all of them raise alike.

    Raises:
        LockstepError: naming the trouble.
    """
    if found := [text for text in troubles if text]:
        raise LockstepError(
            f"the compiled kernel cannot be loaded on a rank: {found[0]}",
            needed="the kernel that this version of the package builds, or none, on every host",
            cure="`make setup` there; LOCKSTEP_KERNEL=0 leaves it out",
        )


def load() -> tuple[Any, str]:
    """Return the library as `library` does, and what trouble there was. Local; raises nothing."""
    try:
        return library(), ""
    except OSError as error:
        return None, f"{platform.node()}: {error}"


def pointers(addresses: Sequence[int]) -> Any:
    """Return an array of C pointers. Local."""
    return (c_void_p * len(addresses))(*addresses)


def slice_of(rank: int, size: int, count: int, itemsize: int) -> tuple[int, int]:
    """Return where a rank's slice of a buffer lies: as equal as cache lines allow. Local.

    The kernel cuts in the same way.

    Args:
        rank: whose slice.
        size: number of slices.
        count: elements of the buffer.
        itemsize: bytes of an element.
    """
    line = 64 // itemsize
    lines = -(-count // line)
    begin, end = lines * rank // size * line, lines * (rank + 1) // size * line
    return min(begin, count), min(end, count)


def sum_in_torch(
    windows: Sequence[torch.Tensor], begin: int, end: int, targets: int | None = None
) -> None:
    """Do what lockstep_sum does, in torch operations, to the same bits. Local.

    Args:
        windows: flat tensors of one dtype and length.
        begin: first element of those that are summed.
        end: the one after the last.
        targets: how many of the windows get the sum; by default all.
    """
    wide = torch.float32 if windows[0].dtype.itemsize == 2 else windows[0].dtype
    # Block by block, so that what is read once is still in the cache when it is written.
    for start in range(begin, end, 16_384):
        stop = min(start + 16_384, end)
        total = windows[0][start:stop].to(wide, copy=True)
        for window in windows[1:]:
            total += window[start:stop]
        for window in windows[:targets]:
            window[start:stop] = total


def _declare(loaded: ctypes.CDLL) -> ctypes.CDLL:
    version = getattr(loaded, "lockstep_version", None)
    if version is None or version() != _VERSION:
        raise OSError("the compiled kernel is of another version: `make setup` builds it anew")
    team, state, places, data = c_void_p, c_void_p, c_void_p, c_void_p
    head: list[Any] = [team, c_uint32, c_int64, state]
    staged: list[Any] = [*head, places, c_size_t, data]
    loaded.lockstep_slot_bytes.restype = c_size_t
    loaded.lockstep_team_bytes.restype = c_size_t
    loaded.lockstep_sum.argtypes = [c_int, places, c_int, c_size_t, c_size_t]
    loaded.lockstep_signatures.argtypes = [team, c_uint32, c_void_p]
    loaded.lockstep_meet.argtypes = head
    loaded.lockstep_windows.argtypes = [*head, places, c_size_t, c_int, c_int]
    loaded.lockstep_spread.argtypes = [*head, places, c_size_t, c_int]
    loaded.lockstep_small.argtypes = [*staged, c_size_t, c_int]
    loaded.lockstep_staged.argtypes = [*staged, c_size_t, c_int]
    loaded.lockstep_broadcast.argtypes = [*staged, c_size_t, c_int]
    loaded.lockstep_gather.argtypes = [*staged, c_size_t, places]
    loaded.lockstep_scatter.argtypes = [*staged, c_void_p, c_size_t, c_int]
    if loaded.lockstep_team_bytes() != ctypes.sizeof(Team):
        raise OSError("the compiled kernel is of another layout: `make setup` builds it anew")
    return loaded
