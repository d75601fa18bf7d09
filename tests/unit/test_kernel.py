"""The compiled sum and the one in torch operations give the same bits."""

from __future__ import annotations

import pytest
import torch

from lockstep import kernel

LENGTHS = [0, 1, 2, 15, 16, 17, 1023, 1024, 1025, 5000]


@pytest.fixture(scope="module", name="library")
def _library() -> object:
    found = kernel.library()
    if found is None:
        pytest.skip("no compiled kernel here: the package was built without a C compiler")
    return found


def _values(dtype: torch.dtype, count: int, rank: int) -> torch.Tensor:
    """Return random numbers of all magnitudes, and those that arithmetic treats in its own way."""
    generator = torch.Generator().manual_seed(100 * count + rank)
    numbers = torch.randn(count, generator=generator, dtype=torch.float64)
    numbers *= 10.0 ** torch.randint(-6, 5, (count,), generator=generator)
    odd = [float("inf"), -float("inf"), float("nan"), 0.0, -0.0, 1e-310, 1e-45, 65504.0, 3e38]
    for i, value in enumerate(odd):
        if count > 2 * i:
            numbers[2 * i] = value
    return numbers.to(dtype)


def _bits(tensor: torch.Tensor) -> list[int]:
    """Return the bits of each number; which NaN a sum gives, no standard says."""
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.masked_fill(tensor.isnan(), float("nan")).view(kind).tolist()


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", kernel.DTYPES, ids=str)
def test_same_bits(library: object, dtype: torch.dtype, ranks: int) -> None:
    """Lengths around those of a vector and of a chunk; all of a buffer, and a slice of it."""
    if dtype is torch.float16 and not library.lockstep_has_float16():  # type: ignore[attr-defined]
        pytest.skip("this compiler has no float16")
    for count in LENGTHS:
        for begin, end in ((0, count), (count // 3, count - count // 4)):
            windows = [_values(dtype, count, rank) for rank in range(ranks)]
            others = [window.clone() for window in windows]
            addresses = kernel.pointers([window.data_ptr() for window in windows])
            library.lockstep_sum(  # type: ignore[attr-defined]
                kernel.DTYPES[dtype], addresses, ranks, begin, end
            )
            kernel.sum_in_torch(others, begin, end)
            for window, other in zip(windows, others, strict=True):
                assert _bits(window) == _bits(other)


def test_sum_is_rounded_once() -> None:
    """256 and three ones in bfloat16: rounded after each addition it would stay 256."""
    windows = [torch.tensor([256.0 if rank == 0 else 1.0]).bfloat16() for rank in range(4)]
    kernel.sum_in_torch(windows, 0, 1)
    assert all(window.item() == torch.tensor(259.0).bfloat16().item() for window in windows)
