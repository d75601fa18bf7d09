"""What the verbs must return, computed on one rank from the inputs of all ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

RedOpType = ReduceOp.RedOpType
# torch's stubs do not know the members.
Op: Any = RedOpType

REALS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
COMPLEX = [torch.complex64, torch.complex128]
SIGNED = [torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
ADDABLE = [*REALS, *COMPLEX, *SIGNED, *UNSIGNED, torch.bool]
# These can be moved between ranks, and not added.
MOVABLE_ONLY = [torch.float8_e4m3fn, torch.float8_e5m2]

ORDERED = [Op.MIN, Op.MAX]
BITWISE = [Op.BAND, Op.BOR, Op.BXOR]
ARITHMETIC = [Op.SUM, Op.PRODUCT, Op.AVG, Op.PREMUL_SUM]
OPS = [*ARITHMETIC, *ORDERED, *BITWISE]

FACTOR = 2.0


def supported(dtype: torch.dtype) -> list[RedOpType]:
    """Return the operators that a dtype has; the others must be refused."""
    if dtype is torch.bool:
        return [Op.SUM, Op.PRODUCT, *ORDERED, *BITWISE]
    if dtype.is_complex:
        return ARITHMETIC
    if dtype.is_floating_point:
        return [*ARITHMETIC, *ORDERED]
    return [Op.SUM, Op.PRODUCT, Op.AVG, *ORDERED, *BITWISE]


def operator(op: RedOpType) -> ReduceOp | RedOpType:
    """Return what is passed to a verb for an operator."""
    return dist._make_nccl_premul_sum(FACTOR) if op == Op.PREMUL_SUM else op


def values(dtype: torch.dtype, rank: int, count: int, seed: int = 0) -> torch.Tensor:
    """Return the input of a rank: the same on whichever rank it is asked for."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype is torch.bool:
        return torch.rand(count, generator=generator) < 0.6
    if dtype.is_complex:
        return torch.randn(count, dtype=dtype, generator=generator)
    if dtype.is_floating_point:
        return torch.randn(count, dtype=torch.float64, generator=generator).to(dtype)
    # Sums of four of these fit into int8, and odd ones do not divide by the number of ranks.
    low = -9 if dtype.is_signed else 1
    return torch.randint(low, 10, (count,), generator=generator).to(dtype)


def reduced(inputs: list[torch.Tensor], op: RedOpType) -> torch.Tensor:
    """Return the reduction of the inputs of all ranks, computed wide and rounded once."""
    dtype = inputs[0].dtype
    wide = [_widen(tensor) for tensor in inputs]
    if op == Op.PREMUL_SUM:
        wide = [tensor * int(FACTOR) for tensor in wide]
    total = functools.reduce(_FUNCTIONS[op], wide)
    if op == Op.AVG:
        if wide[0].dtype is torch.int64:
            total = torch.div(total, len(inputs), rounding_mode="trunc")
        else:
            total = total / len(inputs)
    return total.to(dtype)


def expect_equal(found: torch.Tensor, expected: torch.Tensor, op: RedOpType | None = None) -> None:
    """Assert that a result is right: to the bit, but for sums and products of fractions.

    MPI may add in any order. Sums of four numbers of 8 or 11 bits are exact in float32 in any
    order, so bfloat16 and float16 must be equal to the bit; their products need not be.
    """
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    exact = op is None or op in (*ORDERED, *BITWISE)
    exact = exact or not (found.is_floating_point() or found.is_complex())
    if found.dtype in (torch.bfloat16, torch.float16) and op != Op.PRODUCT:
        exact = True
    if exact:
        same = torch.equal(found, expected) if found.numel() else True
        assert same, f"found {found}\nexpected {expected}"
    else:
        torch.testing.assert_close(found, expected)


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype in (torch.bfloat16, torch.float16):
        return tensor.float()
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    if tensor.is_floating_point():
        return tensor.double()
    return tensor if tensor.dtype is torch.bool else tensor.to(torch.int64)


def _truth(logical: Callable, other: Callable) -> Callable:
    return lambda a, b: logical(a, b) if a.dtype is torch.bool else other(a, b)


_FUNCTIONS: dict[RedOpType, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    Op.SUM: _truth(torch.logical_or, torch.add),
    Op.AVG: torch.add,
    Op.PREMUL_SUM: torch.add,
    Op.PRODUCT: _truth(torch.logical_and, torch.mul),
    Op.MIN: torch.minimum,
    Op.MAX: torch.maximum,
    Op.BAND: torch.bitwise_and,
    Op.BOR: torch.bitwise_or,
    Op.BXOR: torch.bitwise_xor,
}
