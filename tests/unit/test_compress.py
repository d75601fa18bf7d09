"""The parts of compression that need one process: names, rounding, the largest numbers."""

from __future__ import annotations

import pytest
import torch

from lockstep.compress import NAMES, Compression, parse
from lockstep.compress.low_rank import multiply
from lockstep.compress.rounded import round_to
from lockstep.compress.sparse import add_up, count_of, largest
from lockstep.errors import SettingsError


def test_names() -> None:
    """With a number and without."""
    assert [parse(name).kind for name in NAMES] == ["bf16", "fp16", "powersgd", "topk"]
    assert parse("powersgd:2") == Compression("powersgd", 2.0)
    assert parse("topk:0.5") == Compression("topk", 0.5)
    for text in ("bf16", "powersgd:4", "topk:0.01"):
        assert str(parse(text)) == text


@pytest.mark.parametrize(
    "text",
    ["", "int8", "BF16", "bf16:2", "topk:0", "topk:1.5", "topk:", "topk:nan"]
    + [f"powersgd:{rank}" for rank in (0, 1.5, "x", 9999)],
)
def test_refuses_by_name(text: str) -> None:
    """The message lists the known ones."""
    with pytest.raises(SettingsError, match="powersgd:R with a rank"):
        parse(text)


def test_rounding_keeps_what_is_not_finite() -> None:
    """What is too large becomes the largest; infinities and NaN stay."""
    inf = float("inf")
    numbers = torch.tensor([1e5, -1e5, inf, -inf, float("nan"), 1.0])
    found = round_to(numbers, torch.float16).to(torch.float32)
    assert found[:4].tolist() == [65504.0, -65504.0, inf, -inf]
    assert found[4].isnan()
    assert round_to(torch.tensor([3.4e38]), torch.bfloat16).isfinite()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("k", [1, 2, 3, 7])
def test_a_message_brings_the_largest(dtype: torch.dtype, k: int) -> None:
    """To the bit, and what is not sent is zero."""
    numbers = torch.tensor([0.1, -5.0, 0.3, 4.0, -0.2, 3.0, 1e-30], dtype=dtype)
    message, given = largest(numbers, k)
    assert len(message) == k * (dtype.itemsize // 4 + 1)
    assert int((given != 0).sum()) == k
    assert torch.equal(given[given != 0], numbers[given != 0])
    assert given.abs().max() == 5.0
    both = torch.stack([message, message])
    assert torch.equal(add_up(both, numbers, k), 2 * given)


def test_at_least_one_number_is_sent() -> None:
    """However small the share is; none of an empty piece."""
    assert [count_of(0.01, n) for n in (0, 1, 50, 250, 1000)] == [0, 1, 1, 2, 10]
    assert count_of(1.0, 7) == 7


def test_products() -> None:
    """As a library multiplies, up to rounding."""
    left, right = torch.randn(5, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    out = torch.empty(5, 4, dtype=torch.float64)
    multiply(left, right, out)
    torch.testing.assert_close(out, left @ right.T)
