"""The same for DistributedDataParallel, as communication hooks."""

# Without `from __future__ import annotations`: DDP wants the annotations of a hook as types.
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from lockstep.compress.feedback import Compressor
from lockstep.compress.make import Compression, make, parse

Hook = Callable[[Any, Any], torch.futures.Future[torch.Tensor]]


def ddp_hook(name: str, group: Any = None) -> tuple[Any, Hook]:
    """Return what ``ddp.register_comm_hook(*ddp_hook("topk"))`` wants. Local.

    "bf16" and "fp16" are torch's own hooks, which keep no errors. "powersgd" and "topk" are those
    of `lockstep.compress`, over every backend: torch's PowerSGD waits for a sum inside of the
    callback of another one, and hangs where a backend calls it in the thread that would sum. A
    bucket is summed before backward goes on. What is kept is in no state_dict of the model.

    Args:
        name: see `lockstep.compress.parse`.
        group: that of the DistributedDataParallel; by default all ranks.

    Raises:
        SettingsError: there is no such way.
    """
    compression = parse(name)
    group = group if group is not None else dist.group.WORLD
    if compression.kind == "bf16":
        return group, default_hooks.bf16_compress_hook
    if compression.kind == "fp16":
        return group, default_hooks.fp16_compress_hook
    return _Memory(compression, group), _mean


class _Memory:
    """The compressors of DDP's buckets, which it lays out anew after the first step."""

    def __init__(self, compression: Compression, group: Any) -> None:
        self.size = dist.get_world_size(group)
        self._compression, self._group = compression, group
        self._compressors: dict[tuple[int, ...], tuple[Compressor, torch.Tensor]] = {}
        self._kept: dict[int, torch.Tensor] = {}

    def of(self, parameters: list[torch.Tensor], like: torch.Tensor) -> Any:
        """Return the compressor of a bucket, and the piece that it sums."""
        key = tuple(map(id, parameters))
        if key not in self._compressors:
            piece, shapes = torch.zeros_like(like), [p.shape for p in parameters]
            made = make(self._compression, [(piece, shapes)], self._group)
            parts = made.kept(0).split([p.numel() for p in parameters])
            for number, part in zip(key, parts, strict=True):
                if number in self._kept:
                    part.copy_(self._kept[number])
                self._kept[number] = part
            self._compressors[key] = made, piece
        return self._compressors[key]


def _mean(state: _Memory, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Replace a bucket by about its mean over the ranks. Collective."""
    compressor, piece = state.of(bucket.parameters(), bucket.buffer())
    piece.copy_(bucket.buffer())
    compressor.begin_evenly()
    compressor.reduce(0)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer().copy_(piece).div_(state.size))
    return future
