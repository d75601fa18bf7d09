"""What several of the tests need to call torch.distributed in a line."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def new_group(*arguments: Any, **named: Any) -> dist.ProcessGroup:
    """Open a group on a rank that is a member of it."""
    group = dist.new_group(*arguments, **named)
    assert isinstance(group, dist.ProcessGroup)
    return group


def wait(work: dist.Work | None) -> None:
    """Wait for what an asynchronous call has returned; a synchronous one returns nothing."""
    if work is not None:
        work.wait()
