"""The one table from torch's dtypes and operators to MPI's.

Data that is only moved travels as bytes, so any dtype of fixed width will do. Data that is added,
multiplied or compared needs a row here; what has none is refused by name, because MPI would take
it for something else and return numbers without an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from mpi4py import MPI
from torch.distributed import ReduceOp

from lockstep import kernel

# torch's stubs know neither PREMUL_SUM nor the attributes of an operator.
Operator = Any
_KIND: Any = ReduceOp.RedOpType

_SUM, _PRODUCT, _MIN, _MAX = _KIND.SUM, _KIND.PRODUCT, _KIND.MIN, _KIND.MAX
_BAND, _BOR, _BXOR = _KIND.BAND, _KIND.BOR, _KIND.BXOR
_AVG, _PREMUL_SUM = _KIND.AVG, _KIND.PREMUL_SUM

_REAL = {_SUM: MPI.SUM, _PRODUCT: MPI.PROD, _MIN: MPI.MIN, _MAX: MPI.MAX}
_REAL |= {_AVG: MPI.SUM, _PREMUL_SUM: MPI.SUM}
# A whole number times a factor need not be whole.
_INTEGER = {kind: op for kind, op in _REAL.items() if kind != _PREMUL_SUM}
_INTEGER |= {_BAND: MPI.BAND, _BOR: MPI.BOR, _BXOR: MPI.BXOR}
# A bool is a truth value: its sum is "any", its product "all".
_LOGICAL = {_SUM: MPI.LOR, _MAX: MPI.LOR, _BOR: MPI.LOR, _BXOR: MPI.LXOR}
_LOGICAL |= {_PRODUCT: MPI.LAND, _MIN: MPI.LAND, _BAND: MPI.LAND}
# Complex numbers have no order.
_COMPLEX = {_SUM: MPI.SUM, _PRODUCT: MPI.PROD, _AVG: MPI.SUM, _PREMUL_SUM: MPI.SUM}


@dataclass(frozen=True)
class Arithmetic:
    """How MPI computes with a dtype.

    Attributes:
        wire: the dtype in which the numbers travel and are added.
        datatype: MPI's name of that dtype.
        ops: torch's operators and MPI's for them.
    """

    wire: torch.dtype
    datatype: MPI.Datatype
    ops: dict[Operator, MPI.Op]


def _as(wire: torch.dtype, datatype: MPI.Datatype, ops: dict[Operator, MPI.Op]) -> Arithmetic:
    return Arithmetic(wire, datatype, ops)


_ARITHMETIC: dict[torch.dtype, Arithmetic] = {
    torch.float32: _as(torch.float32, MPI.FLOAT, _REAL),
    torch.float64: _as(torch.float64, MPI.DOUBLE, _REAL),
    # MPI has no bfloat16 and need not have a float16; added in float32 they lose nothing on the
    # way and are rounded once.
    torch.bfloat16: _as(torch.float32, MPI.FLOAT, _REAL),
    torch.float16: _as(torch.float32, MPI.FLOAT, _REAL),
    torch.int8: _as(torch.int8, MPI.INT8_T, _INTEGER),
    torch.int16: _as(torch.int16, MPI.INT16_T, _INTEGER),
    torch.int32: _as(torch.int32, MPI.INT32_T, _INTEGER),
    torch.int64: _as(torch.int64, MPI.INT64_T, _INTEGER),
    torch.uint8: _as(torch.uint8, MPI.UINT8_T, _INTEGER),
    torch.uint16: _as(torch.uint16, MPI.UINT16_T, _INTEGER),
    torch.uint32: _as(torch.uint32, MPI.UINT32_T, _INTEGER),
    torch.uint64: _as(torch.uint64, MPI.UINT64_T, _INTEGER),
    torch.bool: _as(torch.bool, MPI.C_BOOL, _LOGICAL),
    torch.complex64: _as(torch.complex64, MPI.C_FLOAT_COMPLEX, _COMPLEX),
    torch.complex128: _as(torch.complex128, MPI.C_DOUBLE_COMPLEX, _COMPLEX),
}

# Numbers for dtypes and operators that are the same in every process, for comparing calls.
DTYPE_CODES: dict[torch.dtype, int] = {
    dtype: code
    for code, dtype in enumerate(
        sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
    )
}


@dataclass(frozen=True)
class Reduction:
    """One operator on one dtype, ready for MPI.

    Attributes:
        arithmetic: the row of the table.
        op: MPI's operator.
        code: a number that stands for dtype and operator, the same in all processes.
        name: the operator's name.
        is_sum: whether the kernel for shared memory can do it.
        before: what to do to this rank's numbers first (PREMUL_SUM), or None.
        after: what to do to the result of a group of n ranks (AVG), or None; both work in place
            on a flat tensor of the wire dtype.
    """

    arithmetic: Arithmetic
    op: MPI.Op
    code: int
    name: str
    is_sum: bool
    before: Callable[[torch.Tensor], object] | None = None
    after: Callable[[torch.Tensor, int], object] | None = None


_PLAIN: dict[tuple[torch.dtype, Operator], Reduction] = {}


def reduction(dtype: torch.dtype, op: Operator) -> Reduction:
    """Return how to apply op to tensors of dtype. Local.

    Raises:
        TypeError: naming the dtype or the operator that is not supported.
    """
    kind = op.op
    if (known := _PLAIN.get((dtype, kind))) is not None:
        return known
    made = _make(dtype, kind, op)
    if kind != _PREMUL_SUM:
        _PLAIN[dtype, kind] = made
    return made


def _make(dtype: torch.dtype, kind: Operator, op: Operator) -> Reduction:
    row = _ARITHMETIC.get(dtype)
    if row is None:
        names = ", ".join(sorted(str(d).removeprefix("torch.") for d in _ARITHMETIC))
        raise TypeError(
            f"the mpi backend cannot reduce tensors of dtype {dtype}\n"
            f"  needed: one of {names}\n  to do:  convert first, such as tensor.float()"
        )
    if kind not in row.ops:
        names = ", ".join(k.name for k in row.ops)
        raise TypeError(
            f"the mpi backend cannot apply ReduceOp.{kind.name} to tensors of dtype {dtype}\n"
            f"  needed: one of {names}\n  to do:  choose another operator or dtype"
        )
    before: Callable[[torch.Tensor], object] | None = None
    after: Callable[[torch.Tensor, int], object] | None = None
    if kind == _AVG:
        whole = not (row.wire.is_floating_point or row.wire.is_complex)
        after = _divide_whole if whole else torch.Tensor.div_
    if kind == _PREMUL_SUM:
        factor = op.__getstate__()[1]
        before = lambda numbers: numbers.mul_(factor)  # noqa: E731
    code = 100 * DTYPE_CODES[dtype] + int(kind)
    # A mean of halves would be rounded twice there: as a sum, and after the division.
    exact = kind == _SUM or (kind == _AVG and row.wire is dtype)
    is_sum = dtype in kernel.DTYPES and exact
    return Reduction(row, row.ops[kind], code, kind.name, is_sum, before, after)


def _divide_whole(numbers: torch.Tensor, n: int) -> None:
    """Divide whole numbers by n, cut towards zero."""
    if numbers.dtype in (torch.uint16, torch.uint32, torch.uint64):
        # torch does not compute with these; numpy does, in the same memory.
        array = numbers.numpy()
        array //= n
    else:
        numbers.div_(n, rounding_mode="trunc")
