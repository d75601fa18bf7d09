"""The gradients of a model in one flat buffer, summed over all ranks while backward still runs.

Every ``.grad`` is a view of the buffer, so that nothing is copied. The buffer is cut into buckets,
in the reverse order of the parameters, which is about the order in which backward produces them.
All ranks sum the buckets in this order, whatever the order on a rank is, and each bucket as soon
as its turn has come and its gradients are there.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lockstep import compress, notes
from lockstep.checks import check_examples
from lockstep.compress import Compression, Compressor
from lockstep.flat import Flat, by_kind
from lockstep.pipeline import Line
from lockstep.reducers import make, may_overlap
from lockstep.world import World

# Large enough that the cost of a message is small, small enough that backward hides most of them.
BUCKET_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Options:
    """How gradients are summed; the same on all ranks.

    Attributes:
        allreduce: name of an algorithm, see `lockstep.allreduce.NAMES`; "auto" chooses.
        bucket_bytes: they are summed in pieces of this size.
        compress: how to send fewer bytes, see `lockstep.compress`; the algorithm is its own then.
    """

    allreduce: str = "auto"
    bucket_bytes: int = BUCKET_BYTES
    compress: Compression | str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.bucket_bytes, int) or self.bucket_bytes < 1:
            raise ValueError(
                f"found bucket_bytes={self.bucket_bytes!r}\n  needed: a whole number, 1 or more\n"
                f"  to do:  leave it at {BUCKET_BYTES}"
            )


class _Bucket:
    """A part of the buffer and how many of its gradients are still to come.

    It is summed in pieces, so that what a sum needs besides does not grow with a large parameter.
    """

    def __init__(self, part: torch.Tensor, members: int, piece_bytes: int) -> None:
        self.part, self.members, self.missing = part, members, members
        self.pieces = part.split(max(1, piece_bytes // part.element_size()))


class Gradients:
    """Sums the gradients of some parameters over the ranks of a group.

    Args:
        parameters: those that get gradients; the same on all ranks, in the same order.
        world: all ranks.
        group: a process group of its own, so that its messages meet no others.
        options: the algorithm, the size of a bucket, the compression.

    Attributes:
        flats: the buffers, one a dtype.
        waited: seconds that the calling thread has waited for communication.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], world: World, group: Any, options: Options
    ) -> None:
        self.parameters = [p for p in parameters if p.requires_grad][::-1]
        self.flats: list[Flat] = []
        self._members: list[list[nn.Parameter]] = []
        self.waited = 0.0
        self._views: dict[nn.Parameter, torch.Tensor] = {}
        self._bucket_of: dict[nn.Parameter, int] = {}
        self._buckets: list[_Bucket] = []
        self._hooks: list[Any] = []
        groups = by_kind(self.parameters)
        kinds = [(m[0].dtype, m[0].device, sum(p.numel() for p in m)) for m in groups]
        # Nothing is summed in the buffers themselves where sums are compressed.
        name = options.allreduce if options.compress is None else "ring"
        self.reducer = make(name, kinds, world, group, options.bucket_bytes)
        for members, buffer in zip(groups, self.reducer.buffers, strict=True):
            self._lay_out(members, buffer, options.bucket_bytes)
        for parameter in self.parameters:
            self._hooks.append(parameter.register_post_accumulate_grad_hook(self._arrived))
        self.compressor = self._compress(options.compress, group)
        stages = [self._sum_compressed] if self.compressor else self.reducer.stages
        self._line = Line(stages, overlap=may_overlap())
        self._next = 0
        self._examples: int | None = None
        self._accumulating = False
        self._reduced = False
        self.zero()

    def zero(self) -> None:
        """Set all gradients to zero and forget the examples of the last step. Local.

        Sums that have begun are waited for: a batch may be thrown away on all ranks alike.
        """
        self._line.finish()
        for flat in self.flats:
            flat.buffer.zero_()
        for parameter, view in self._views.items():
            parameter.grad = view
        self._begin()

    def backward(self, loss: torch.Tensor, examples: int) -> None:
        """Add the gradients of a batch; sum them over the ranks meanwhile. Collective in effect.

        The loss is weighted by its examples before, not after: a bucket may then be summed as soon
        as it is complete, and batches of different sizes add up rightly.

        Args:
            loss: scalar; the mean over the examples.
            examples: number of examples it is the mean of.
        """
        self._require_open()
        check_examples(examples)
        if self._next:
            raise ValueError(
                "a second backward() on gradients whose sum over the ranks has begun\n"
                "  needed: one backward() a step, or accumulate() around all but the last\n"
                "  to do:  with sgd.accumulate(): sgd.backward(…)"
            )
        self._examples = (self._examples or 0) + examples
        for bucket in self._buckets:
            bucket.missing = bucket.members
        (loss * examples).backward()
        self._launch()

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Keep what backward adds on this rank, without communication. Local."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def reduce(self, examples: int | None = None, *, mean: bool = True) -> int:
        """Finish the sums and make the gradients those of the joined batch. Collective.

        Args:
            examples: local number, if backward was called on the loss itself; 0 on a rank without
                data. None after `backward`, which was told.
            mean: False leaves them the sums over the examples, which the caller then divides.

        Returns:
            the number of examples on all ranks together; with 0 the gradients are zeros.

        Raises:
            ValueError: nobody has said how many examples there were.
        """
        self._require_open()
        if examples is not None:
            check_examples(examples)
        if examples is None and self._examples is None:
            raise ValueError(
                "step() after loss.backward() does not know how many examples the loss is of\n"
                "  needed: step(examples=len(batch)), or this object's backward(loss, examples=…)\n"
                "  to do:  pass the number of examples of this rank, 0 if it had none"
            )
        if self._examples is None:
            # The caller's own backward made a mean of it.
            for flat in self.flats:
                flat.buffer.mul_(float(examples or 0))
            self._examples = examples
        start = time.perf_counter()
        total = self._finish()
        self.waited += time.perf_counter() - start
        for flat in self.flats if total and mean else []:
            flat.buffer.div_(total)
        self._reduced = True
        return total

    def close(self) -> None:
        """Let go of the parameters and stop the thread; the gradients stay. Local."""
        for hook in self._hooks:
            hook.remove()
        self.reducer.close()
        self._line.close()

    def members_of(self, flat: Flat) -> list[nn.Parameter]:
        """Return the parameters whose gradients live in a buffer, in its order. Local."""
        return self._members[self.flats.index(flat)]

    def in_order(self) -> list[nn.Parameter]:
        """Return all parameters in the order of the buffers. Local."""
        return [parameter for members in self._members for parameter in members]

    @property
    def reduced(self) -> bool:
        """Whether the gradients are those of all ranks already."""
        return self._reduced

    @notes.during(notes.SUMS, "sum of gradients")
    def _finish(self) -> int:
        for bucket in self._buckets:
            bucket.missing = 0  # what has not come is zeros
        self.reducer.be_eager(True)
        try:
            self._launch(every=True)
            self._line.finish()
            return self.reducer.count(self._examples or 0)
        finally:
            self.reducer.be_eager(False)

    def _arrived(self, parameter: nn.Parameter) -> None:
        """Take note of a gradient; autograd calls this, in its own order and thread."""
        view = self._views[parameter]
        if parameter.grad is not None and parameter.grad is not view:
            if parameter.grad.data_ptr() != view.data_ptr():
                # Somebody set the gradient to None, and autograd made a new one.
                view.copy_(parameter.grad)
            parameter.grad = view
        bucket = self._buckets[self._bucket_of[parameter]]
        bucket.missing -= 1
        if bucket.missing < 0 and self._examples is not None and not self._accumulating:
            raise ValueError(
                f"a parameter {list(parameter.shape)} got a second gradient in one backward(), as "
                "reentrant checkpoints give it; its sum over the ranks may have begun\n"
                "  needed: one gradient a parameter in a backward()\n"
                "  to do:  checkpoint(…, use_reentrant=False), or loss.backward() and "
                "step(examples=…)"
            )
        # Only backward() of ours has weighted the loss, so that the sum may start.
        if bucket.missing == 0 and self._examples is not None:
            self._launch()

    def _launch(self, every: bool = False) -> None:
        """Start the sums of the buckets whose turn has come."""
        if self._accumulating or not (every or self._line.overlaps):
            return
        while self._next < len(self._buckets) and self._buckets[self._next].missing == 0:
            number, self._next = self._next, self._next + 1
            for work in [number] if self.compressor else self._buckets[number].pieces:
                self._line.put(work, wait=every)

    def _compress(self, how: Compression | str | None, group: Any) -> Compressor | None:
        if how is None:
            return None
        shapes = [p.shape for members in self._members for p in members]
        buckets, start = [], 0
        for bucket in self._buckets:
            buckets.append((bucket.part, shapes[start : start + bucket.members]))
            start += bucket.members
        return compress.make(how, buckets, group)

    def _sum_compressed(self, number: int) -> None:
        assert self.compressor is not None
        if number == 0:
            # What is kept from earlier steps is in units of the mean over all examples.
            self.compressor.begin(self._examples or 0)
        self.compressor.reduce(number)

    def _begin(self) -> None:
        self._next = 0
        self._examples, self._reduced = None, False
        for bucket in self._buckets:
            bucket.missing = bucket.members

    def _require_open(self) -> None:
        if self._reduced:
            raise ValueError(
                "the gradients have been summed over all ranks already\n"
                "  needed: zero_grad() between two steps\n  to do:  call it before backward"
            )

    def _lay_out(
        self, members: list[nn.Parameter], buffer: torch.Tensor, bucket_bytes: int
    ) -> None:
        flat = Flat([p.detach() for p in members], buffer)
        self.flats.append(flat)
        self._members.append(members)
        width = flat.buffer.element_size()
        start, first = 0, 0
        for i, (parameter, view, end) in enumerate(
            zip(members, flat.views, flat.ends, strict=True)
        ):
            self._views[parameter] = view
            self._bucket_of[parameter] = len(self._buckets)
            if (end - start) * width >= bucket_bytes or i == len(members) - 1:
                self._buckets.append(
                    _Bucket(flat.buffer[start:end], i + 1 - first, 2 * bucket_bytes)
                )
                start, first = end, i + 1
