"""Measure all-reduces size by size, each contender's sum checked once before it is timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from lockstep.bench.bandwidth import algorithm_bandwidth, bus_bandwidth
from lockstep.bench.contenders import Contender, Prepared
from lockstep.bench.measure import Sample, Told, compare_within, never
from lockstep.errors import LockstepError
from lockstep.world import World

Say = Callable[[str], object]
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


# Shorter buffers, in bytes, take as long as each other.
_FLAT = 2**18


@dataclass(frozen=True)
class Row:
    """One contender at one size.

    Attributes:
        what: the operation.
        nbytes: length of the buffer on a rank.
        name, backend, algorithm: of the contender.
        median, low, high: seconds of the slowest rank: the median and the quartiles.
        n: number of calls.
        algbw, busbw: bytes a second, see `lockstep.bench.bandwidth`; busbw None where no sum is.
    """

    what: str
    nbytes: int
    name: str
    backend: str
    algorithm: str
    median: float
    low: float
    high: float
    n: int
    algbw: float
    busbw: float | None


class Clock:
    """The time that is left, by the root's clock, the same on all ranks. Making it is Local.

    Args:
        world: the ranks.
        seconds: in all.
        told: whether to stop before they are over.

    Attributes:
        why: why no time is left, in words.
    """

    def __init__(self, world: World, seconds: float, told: Told = never) -> None:
        self._world, self._end, self._told = world, time.monotonic() + seconds, told
        self.why = f"no time left of {seconds:g} s"

    def left(self) -> float:
        """Return the seconds that are left, 0 if it is to stop now. Collective."""
        if self._told():
            self.why = "told to stop"
            return 0.0
        seconds: float = self._world.comm.bcast(self._end - time.monotonic(), root=0)
        return seconds


def sizes(smallest: int, largest: int, factor: int) -> list[int]:
    """Return lengths in bytes, each factor times the one before, with both ends. Local."""
    found = []
    nbytes = smallest
    while nbytes < largest:
        found.append(nbytes)
        nbytes *= factor
    return [*found, largest]


def measure(
    world: World,
    those: Sequence[Contender],
    lengths: Sequence[int],
    dtype: torch.dtype,
    *,
    seconds: float,
    say: Say = lambda text: None,
    told: Told = never,
) -> tuple[list[Row], dict[str, str]]:
    """Measure contenders at all lengths. Collective.

    Args:
        world: the ranks.
        those, lengths: the contenders; the lengths in bytes, ascending.
        dtype: of the buffers.
        seconds: for all of it; what there is no time for is left out.
        say: told what is being measured.
        told: whether to stop before.

    Returns:
        a row for each contender and length, the same on all ranks; what was left out, and why.

    Raises:
        LockstepError: on all ranks: a contender's sum is wrong.
    """
    clock, rows, left_out, cheapest = Clock(world, seconds, told), [], {}, 0.0
    weights = list(map(_weight, lengths))
    for i, nbytes in enumerate(lengths):
        left = clock.left()
        if i and left < cheapest * max(1.0, nbytes / max(lengths[i - 1], _FLAT)):
            left_out[f"from {nbytes} bytes"] = clock.why
            break
        say(f"{nbytes} bytes, {left:.0f} s left")
        share = left * weights[i] / sum(weights[i:])
        tensor = torch.empty(max(1, nbytes // dtype.itemsize), dtype=dtype)
        samples, cheapest = _one_size(world, those, tensor, share, left_out, told=told)
        rows += [_row(c, nbytes, samples[c.name], world) for c in those if c.name in samples]
    return rows, left_out


def _weight(nbytes: int) -> float:
    """Long buffers need more of the time: a call of them takes longer."""
    return 1.0 if nbytes <= 2**16 else 2.0 if nbytes <= 2**22 else 6.0


def _one_size(
    world: World,
    those: Sequence[Contender],
    tensor: torch.Tensor,
    seconds: float,
    left_out: dict[str, str],
    *,
    told: Told,
) -> tuple[dict[str, Sample], float]:
    """Return the samples, and the seconds that the fewest possible calls would have taken."""
    ready: dict[str, Prepared] = {}
    try:
        for contender in those:
            if contender.name in left_out:
                continue
            prepared, trouble = _prepare(world, contender, tensor)
            if prepared is None:
                left_out[contender.name] = trouble
                continue
            ready[contender.name] = prepared
            prepared.buffer.zero_()
        calls = {name: prepared.call for name, prepared in ready.items()}
        samples = compare_within(world, calls, seconds, told=told)
        return samples, 5 * sum(sample.median for sample in samples.values())
    finally:
        for prepared in ready.values():
            prepared.close()


def _prepare(
    world: World, contender: Contender, tensor: torch.Tensor
) -> tuple[Prepared | None, str]:
    """Make a contender ready and check its sum; or say why it cannot take part. Collective."""
    trouble, prepared = "", None
    try:
        prepared = contender.prepare(tensor)
        if contender.sums:
            _fill(prepared.buffer, world.rank)
            prepared.call()
    except (LockstepError, ValueError, NotImplementedError) as error:
        # Refused on all ranks alike, such as an algorithm that wants another kind of group.
        trouble = str(error).splitlines()[0]
    troubles = [text for text in world.comm.allgather(trouble) if text]
    if troubles or prepared is None:
        return None, troubles[0]
    wrong = contender.sums and not _is_sum(prepared.buffer, world.size)
    if any(world.comm.allgather(wrong)):
        raise LockstepError(
            f"{contender.name} made a wrong sum of {tensor.nbytes} bytes of {tensor.dtype}",
            needed="the sum over all ranks",
            cure="do not use it here; run `make test-mpi`",
        )
    return prepared, ""


def _fill(buffer: torch.Tensor, rank: int) -> None:
    """Put small whole numbers into it, whose sum no dtype rounds on up to 64 ranks."""
    pattern = torch.arange(4, dtype=buffer.dtype, device=buffer.device)
    buffer.copy_(pattern.repeat(-(-buffer.numel() // 4))[: buffer.numel()])
    buffer += rank % 2


def _is_sum(buffer: torch.Tensor, size: int) -> bool:
    pattern = torch.arange(4, dtype=buffer.dtype, device=buffer.device) * size + size // 2
    expected = pattern.repeat(-(-buffer.numel() // 4))[: buffer.numel()]
    if size <= 64:
        return torch.equal(buffer, expected)
    return torch.allclose(buffer, expected, rtol=size * torch.finfo(buffer.dtype).eps)


def _row(contender: Contender, nbytes: int, sample: Sample, world: World) -> Row:
    return Row(
        what="all_reduce" if contender.sums else "copy",
        nbytes=nbytes,
        name=contender.name,
        backend=contender.backend,
        algorithm=contender.algorithm,
        median=sample.median,
        low=sample.low,
        high=sample.high,
        n=sample.n,
        algbw=algorithm_bandwidth(nbytes, sample.median),
        busbw=bus_bandwidth(nbytes, sample.median, world.size) if contender.sums else None,
    )
