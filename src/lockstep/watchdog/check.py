"""Compare what the ranks call before every collective, where the backend does not do so itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from lockstep.notes import CHECK


def compare_calls(backends: Sequence[str]) -> None:
    """With LOCKSTEP_CHECK=1 let torch compare verb, shape and dtype for gloo and nccl. Local.

    Call it before the group is opened. The mpi backend compares the calls of all ranks always, and
    in this mode their shapes too.

    Args:
        backends: their names, such as gloo.
    """
    if CHECK and "mpi" not in backends:
        dist.set_debug_level(dist.DebugLevel.DETAIL)
