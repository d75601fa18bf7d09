"""The collective verbs: each function makes the plan of one call.

A plan says what must be the same on all ranks and how the data moves, with MPI's blocking calls,
once all ranks have agreed (see agreement). All functions here are Local; the plans are Collective.
Tensors are on the CPU; any shape, contiguous or not; sizes are counted in elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from mpi4py import MPI

from lockstep.mpi_backend import on_node
from lockstep.mpi_backend.agreement import Plan
from lockstep.mpi_backend.arguments import same_count, same_total, single
from lockstep.mpi_backend.buffers import (
    blocks,
    check,
    check_written,
    flat,
    give_back,
    memory,
    numbers,
    pieces,
)
from lockstep.mpi_backend.datatypes import DTYPE_CODES, Operator, Reduction, reduction
from lockstep.mpi_backend.summing import reduce_all, scatter_sum

Tensors = Sequence[torch.Tensor]


def barrier(comm: MPI.Intracomm) -> Plan:
    """Plan a barrier: the agreement that comes before every verb already is one."""
    return Plan((), lambda: None)


def all_reduce(comm: MPI.Intracomm, tensors: Tensors, op: Operator) -> Plan:
    """Plan to replace each tensor by its reduction over all ranks."""
    check(tensors)
    check_written(tensors)
    if len(tensors) == 1:
        # By far the most frequent call, and often of a few bytes: it is kept short.
        tensor = tensors[0]
        how = reduction(tensor.dtype, op)
        signature: tuple[int, ...] = (tensor.numel(), how.code)
        plan = Plan(signature, lambda: reduce_all(comm, tensor, how), tensors, how.name, tensors)
        if how.is_sum:
            plan.on_node, plan.added = on_node.total(tensor, how), (tensor.dtype,)
        return plan
    steps = [(tensor, reduction(tensor.dtype, op)) for tensor in tensors]
    signature = tuple(n for t, how in steps for n in (t.numel(), how.code))

    def move() -> None:
        for tensor, how in steps:
            reduce_all(comm, tensor, how)

    plan = Plan(signature, move, tensors, op.op.name, tensors)
    if all(how.is_sum for _, how in steps):
        plan.on_node = on_node.in_turn([on_node.total(*step) for step in steps])
        plan.added = tuple(tensor.dtype for tensor in tensors)
    return plan


def reduce(comm: MPI.Intracomm, tensors: Tensors, op: Operator, root: int) -> Plan:
    """Plan to replace the root's tensor by the reduction over all ranks; others keep theirs."""
    tensor = single(tensors)
    check_written(tensors)
    how = reduction(tensor.dtype, op)

    def move() -> None:
        work = flat(tensor).to(how.arithmetic.wire)
        if how.before is not None:
            work = work.clone() if work.data_ptr() == tensor.data_ptr() else work
            how.before(work)
        mine = comm.rank == root
        for piece in pieces(work):
            spec = numbers(piece, how.arithmetic)
            comm.Reduce(MPI.IN_PLACE if mine else spec, spec if mine else None, how.op, root)
        if mine:
            if how.after is not None:
                how.after(work, comm.size)
            give_back(work, tensor)

    signature = (tensor.numel(), how.code, root)
    return Plan(signature, move, tensors, f"{how.name}, root {root}", tensors)


def broadcast(comm: MPI.Intracomm, tensors: Tensors, root: int) -> Plan:
    """Plan to copy the root's tensor into that of every rank."""
    tensor = single(tensors)
    check_written(tensors if comm.rank != root else [])

    def move() -> None:
        work = flat(tensor)
        for piece in pieces(_bytes(work)):
            comm.Bcast([memory(piece), piece.numel(), MPI.BYTE], root)
        if comm.rank != root:
            give_back(work, tensor)

    signature = (tensor.numel(), DTYPE_CODES[tensor.dtype], root)
    here = on_node.copied(tensor, root, comm.rank)
    return Plan(signature, move, tensors, f"root {root}", tensors, on_node=here)


def all_gather(comm: MPI.Intracomm, outputs: Tensors, mine: torch.Tensor) -> Plan:
    """Plan to copy the tensor of rank r into outputs[r] on every rank, for all r."""
    check([*outputs, mine])
    check_written(outputs)
    same_count(outputs, comm.size, mine, "output")

    def move() -> None:
        gathered = mine.new_empty((comm.size, mine.numel()))
        _all_gather(comm, gathered, mine)
        for target, row in zip(outputs, gathered, strict=True):
            give_back(row, target)

    here = on_node.gathered(outputs, mine, comm.rank)
    return Plan(_size_and_dtype(mine), move, [mine], result=[list(outputs)], on_node=here)


def all_gather_single(comm: MPI.Intracomm, output: torch.Tensor, mine: torch.Tensor) -> Plan:
    """Plan to gather the tensors of all ranks, in order, in one tensor on every rank."""
    check([output, mine])
    check_written([output])
    same_total(output, mine, comm.size, "output", "input")

    def move() -> None:
        gathered = flat(output)
        _all_gather(comm, gathered, mine)
        give_back(gathered, output)

    here = on_node.gathered_in_one(output, mine, comm.rank)
    return Plan(_size_and_dtype(mine), move, [mine], result=output, on_node=here)


def gather(comm: MPI.Intracomm, outputs: Tensors, mine: torch.Tensor, root: int) -> Plan:
    """Plan to copy the tensor of rank r into outputs[r] on the root, for all r."""
    check([*outputs, mine])
    check_written(outputs)
    at_root = comm.rank == root
    if at_root:
        same_count(outputs, comm.size, mine, "output")

    def move() -> None:
        with blocks(mine.nbytes) as (count, kind):
            sent = flat(mine)
            if not at_root:
                comm.Gather([memory(sent), count, kind], None, root)
                return
            gathered = mine.new_empty((comm.size, mine.numel()))
            comm.Gather([memory(sent), count, kind], [memory(gathered), count, kind], root)
        for target, row in zip(outputs, gathered, strict=True):
            give_back(row, target)

    signature = (*_size_and_dtype(mine), root)
    return Plan(signature, move, [mine], f"root {root}", [list(outputs)])


def scatter(comm: MPI.Intracomm, mine: torch.Tensor, inputs: Tensors, root: int) -> Plan:
    """Plan to copy the root's inputs[r] into the tensor of rank r, for all r."""
    check([*inputs, mine])
    check_written([mine])
    at_root = comm.rank == root
    if at_root:
        same_count(inputs, comm.size, mine, "input")

    def move() -> None:
        with blocks(mine.nbytes) as (count, kind):
            received = flat(mine)
            if at_root:
                sent = _joined(inputs)
                comm.Scatter([memory(sent), count, kind], [memory(received), count, kind], root)
            else:
                comm.Scatter(None, [memory(received), count, kind], root)
        give_back(received, mine)

    signature = (*_size_and_dtype(mine), root)
    return Plan(signature, move, [mine], f"root {root}", [mine])


def reduce_scatter(
    comm: MPI.Intracomm, output: torch.Tensor, inputs: Tensors, op: Operator
) -> Plan:
    """Plan to leave on rank r the reduction over all ranks of their inputs[r]."""
    check([*inputs, output])
    check_written([output])
    same_count(inputs, comm.size, output, "input")
    how = reduction(output.dtype, op)
    signature = (output.numel(), how.code)

    def move() -> None:
        scatter_sum(comm, output, _joined(inputs), how)

    plan = Plan(signature, move, [output], how.name, [output])
    return _with_part(plan, output, inputs, how, comm.rank)


def reduce_scatter_single(
    comm: MPI.Intracomm, output: torch.Tensor, whole: torch.Tensor, op: Operator
) -> Plan:
    """Plan to leave on rank r the r-th part of the reduction of whole over all ranks."""
    check([output, whole])
    check_written([output])
    same_total(whole, output, comm.size, "input", "output")
    how = reduction(output.dtype, op)
    signature = (output.numel(), how.code)

    def move() -> None:
        source = flat(whole)
        # The reduction may compute in place, and the caller's input is not ours to change.
        scatter_sum(comm, output, source.clone() if how.before is not None else source, how)

    plan = Plan(signature, move, [output], how.name, output)
    return _with_part(plan, output, [whole], how, comm.rank)


def together(plans: Sequence[Plan]) -> Plan:
    """Join the plans of several tensors into one with a single agreement."""
    moves: list[Callable[[], object]] = [plan.move for plan in plans]

    def move() -> None:
        for each in moves:
            each()

    return Plan(
        (len(plans), *(n for plan in plans for n in plan.signature)),
        move,
        [tensor for plan in plans for tensor in plan.tensors],
        plans[0].note if plans else "",
        [plan.result for plan in plans],
        on_node=on_node.in_turn([plan.on_node for plan in plans]),
        added=tuple(dtype for plan in plans for dtype in plan.added),
    )


def each(make: Callable[..., Plan]) -> Callable[..., Plan]:
    """Turn a plan for a pair of tensors into one for two lists of them."""

    def plan(comm: MPI.Intracomm, outputs: Tensors, inputs: Tensors, *rest: Any) -> Plan:
        return together(
            [make(comm, out, mine, *rest) for out, mine in zip(outputs, inputs, strict=True)]
        )

    return plan


def all_gathers(comm: MPI.Intracomm, outputs: Sequence[Tensors], inputs: Tensors) -> Plan:
    """Plan to gather several tensors of all ranks, with one agreement."""
    # torch's documentation and its backends differ in the nesting: here [rank][i] is the rule.
    by_input = [[row[i] for row in outputs] for i in range(len(inputs))]
    return together(
        [all_gather(comm, out, mine) for out, mine in zip(by_input, inputs, strict=True)]
    )


def _all_gather(comm: MPI.Intracomm, gathered: torch.Tensor, mine: torch.Tensor) -> None:
    sent = flat(mine)
    start, end = gathered.data_ptr(), gathered.data_ptr() + gathered.nbytes
    with blocks(sent.nbytes) as (count, kind):
        target = [memory(gathered), count, kind]
        if sent.data_ptr() == start + comm.rank * sent.nbytes and start != end:
            comm.Allgather(MPI.IN_PLACE, target)
            return
        if (
            start <= sent.data_ptr() < end
            or sent.data_ptr() <= start < sent.data_ptr() + sent.nbytes
        ):
            sent = sent.clone()  # MPI forbids that what is sent and what is received overlap
        comm.Allgather([memory(sent), count, kind], target)


def _with_part(
    plan: Plan, output: torch.Tensor, inputs: Tensors, how: Reduction, rank: int
) -> Plan:
    if how.is_sum:
        plan.on_node = on_node.part_of_total(output, inputs, how, rank)
        plan.added = (output.dtype,)
    return plan


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _joined(tensors: Tensors) -> torch.Tensor:
    return torch.cat([flat(tensor).view(-1) for tensor in tensors])


def _size_and_dtype(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.numel(), DTYPE_CODES[tensor.dtype]
