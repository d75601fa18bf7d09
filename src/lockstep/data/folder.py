"""A set of pictures that does not fit in memory: decoded anew for every batch, by other processes.

The processes are started by "spawn", never by a fork of one that runs MPI, and send pixels back
through a pipe, so that /dev/shm may be as small as it likes.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.util import Finalize
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from lockstep.data.images import normalised
from lockstep.data.shards import Batch
from lockstep.data.workers import apart
from lockstep.errors import DataError

# Seconds to wait for a batch; batches that each worker prepares beforehand.
_LIMIT, _AHEAD = 300.0, 2

Found = tuple[np.ndarray, DataError | None]


@dataclass(frozen=True, eq=False)
class Folder:
    """Pictures in files, and what they show. It is used like `Images`, but batches come by `take`.

    Attributes:
        files: of the pictures.
        labels: int64 [N], each a number of a class; on the device of the batches.
        mean, deviation: of each channel, as shares of 255.
        classes: names of the classes.
        workers: processes that decode for this rank; 0: it does so itself.
        layout: memory format of the batches.
    """

    files: Files
    labels: torch.Tensor
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    classes: tuple[str, ...]
    workers: int = 2
    layout: torch.memory_format = torch.contiguous_format

    def __post_init__(self) -> None:
        """Make the loader, which starts its processes when the first batch is asked for."""
        feed = _Feed()
        loader = _loader(self.files, feed, self.workers)
        object.__setattr__(self, "_feed", feed)
        object.__setattr__(self, "_loader", loader)
        # Holds the loader until then: if garbage collection took both at once, the loader would
        # find its queues closed already, and could not tell its processes to end.
        Finalize(self, _end, (loader,), exitpriority=100)

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, shards: Iterable[Batch]) -> Iterator[tuple[Batch, torch.Tensor, torch.Tensor]]:
        """Yield each batch of this rank with its images and labels, while the next are decoded.

        Local. One `take` at a time: a second one ends the first.

        Args:
            shards: from `batches` or `in_order`; asked for some batches ahead.

        Yields:
            the batch; images, float32 [n, 3, S, S], less the mean, in units of the deviation; and
            labels, int64 [n]; both on the device of the set.

        Raises:
            DataError: a picture cannot be read, or a worker has died or takes longer than 300 s.
        """
        feed: _Feed = self._feed  # type: ignore[attr-defined]
        feed.shards = iter(shards)
        with apart():
            found = iter(self._loader)  # type: ignore[attr-defined]
        while True:
            try:
                pixels, trouble = next(found)
            except StopIteration:
                return
            except RuntimeError as error:
                raise _lost(error) from error
            if trouble is not None:
                # Not `trouble` itself: with this frame in its traceback it would be a circle.
                raise DataError(trouble.found, needed=trouble.needed, cure=trouble.cure)
            shard = feed.ahead.popleft()
            device = self.labels.device
            images = torch.from_numpy(pixels).to(device)
            x = normalised(images, self.mean, self.deviation, self.layout)
            yield shard, x, self.labels[shard.indices.to(device)]

    def to(self, device: torch.device, layout: torch.memory_format) -> Folder:
        """Return the set with its batches on a device, in a memory format. Local."""
        return replace(self, labels=self.labels.to(device), layout=layout)


class Files(Dataset[Any]):
    """Image files, decoded some at a time. Small to send to another process.

    Args:
        paths: of the files.
        size: height and width of the images, in pixels.
    """

    def __init__(self, paths: Sequence[str], size: int) -> None:
        names = [os.fsencode(path) for path in paths]
        self._names = np.frombuffer(b"".join(names), dtype=np.uint8)
        self._ends = np.cumsum([len(name) for name in names])
        self.size = size

    def __len__(self) -> int:
        return len(self._ends)

    def path(self, index: int) -> str:
        """Return the path of an image."""
        start = self._ends[index - 1] if index else 0
        return os.fsdecode(self._names[start : self._ends[index]].tobytes())

    def __getitems__(self, indices: Sequence[int]) -> Found:
        """Return uint8 [n, 3, S, S], or what is wrong with the first image that cannot be read."""
        # Not at the top: only processes that decode need it, and it is slow to import.
        from lockstep.data.decode import decode

        pixels = np.empty((len(indices), 3, self.size, self.size), dtype=np.uint8)
        try:
            for place, index in zip(pixels, indices, strict=True):
                place[:] = decode(self.path(index), self.size).numpy()
        except DataError as error:
            return pixels[:0], error
        return pixels, None


class _Feed(Sampler[list[int]]):
    """Gives the loader the images of batch after batch, and keeps the batches until they come."""

    def __init__(self) -> None:
        self.shards: Iterator[Batch] = iter(())
        self.ahead: deque[Batch] = deque()

    def __iter__(self) -> Iterator[list[int]]:
        self.ahead = deque()
        for shard in self.shards:
            self.ahead.append(shard)
            yield shard.indices.tolist()


def _loader(files: Files, feed: _Feed, workers: int) -> DataLoader[Any]:
    beside: dict[str, Any] = {
        "multiprocessing_context": "spawn",
        "persistent_workers": True,
        "prefetch_factor": _AHEAD,
        "timeout": _LIMIT,
    }
    return DataLoader(
        files,
        batch_sampler=feed,
        num_workers=workers,
        collate_fn=_as_it_is,
        # Its own: otherwise each epoch would draw from the one that seeds the model.
        generator=torch.Generator().manual_seed(0),
        **(beside if workers else {}),
    )


def _end(loader: DataLoader[Any]) -> None:
    """Let the processes end in torch's own way; by force if that takes too long."""
    iterator: Any = loader._iterator
    if iterator is not None:
        iterator._shutdown_workers()
        for process in iterator._workers:
            if process.is_alive():
                process.kill()


def _as_it_is(found: Any) -> Any:
    return found


def _lost(error: RuntimeError) -> DataError:
    return DataError(
        f"the processes that decode pictures have failed: {' '.join(str(error).split())[:300]}",
        needed="each of them alive, and a batch within its time",
        cure="look for one that ran out of memory (dmesg); fewer --workers, or --in-memory yes",
    )
