"""The backend as torch sees it: torch's names for the verbs, and what they map to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from mpi4py import MPI

from lockstep.ending import within_reason
from lockstep.mpi_backend import attendant, collectives, point_to_point, sparse
from lockstep.mpi_backend.agreement import Plan, refuse
from lockstep.mpi_backend.all_to_all import all_to_all, all_to_all_single
from lockstep.mpi_backend.group import Group
from lockstep.mpi_backend.monitored import arrive, verdict
from lockstep.mpi_backend.open import open_communicator
from lockstep.mpi_backend.tags import ARRIVE, RELEASE, ROUNDS, SPLIT
from lockstep.mpi_backend.work import FINISHED, Finished, Pending, Together

if TYPE_CHECKING:

    class _Backend:
        def __init__(self, rank: int, size: int) -> None: ...
        def rank(self) -> int: ...
        def size(self) -> int: ...

    _Options = Any
else:
    from torch._C._distributed_c10d import Backend as _Backend

    _Options = _Backend.Options

_Tensors = Sequence[torch.Tensor]
_Lists = Sequence[_Tensors]

# torch's debug wrapper keeps the C++ half of a backend only; without its Python half, a call of it
# ends in a failed assertion. So open backends are kept here.
_open: set[MPIBackend] = set()
_Works = Finished | Pending | point_to_point.Message


class MPIBackend(_Backend):
    """A torch.distributed backend over one MPI communicator.

    torch calls its methods; users call torch.distributed. Every collective verb is Collective over
    the group; send and recv are Local. Tensors are on the CPU.

    Args:
        comm: the communicator of the group's members, owned by the backend from now on.
        name: torch's name of the group.
        timeout: limit of a verb.
    """

    # A subclass must define these itself: torch's own getters call themselves without end.
    supports_coalescing = property(lambda self: True)
    supports_splitting = property(lambda self: True)
    supports_time_estimate = property(lambda self: False)
    supports_shrinking = property(lambda self: False)
    supports_reconfigure = property(lambda self: False)
    supports_window = property(lambda self: False)

    def __init__(self, comm: MPI.Intracomm, name: str, timeout: timedelta) -> None:
        super().__init__(comm.rank, comm.size)
        self.group = Group(comm, name, timeout.total_seconds())
        self._options = _Options("mpi", timeout)
        self._round = 0
        self._splits = 0
        self._coalesced: list[_Works] | None = None
        _open.add(self)
        if comm.size > 1:
            attendant.attend(self.group)

    @property
    def options(self) -> Any:
        """The options that torch reads: backend name and timeout."""
        return self._options

    def getBackendName(self) -> str:  # torch's spelling
        """Return "mpi"."""
        return "mpi"

    # Collective verbs, each: make the plan, carry it out.

    def allreduce(self, tensors: _Tensors, opts: Any) -> _Works:
        """Reduce each tensor over all ranks, in place."""
        if tensors[0].layout is torch.sparse_coo:
            return self.allreduce_sparse(tensors, opts)
        return self._run("all_reduce", opts, collectives.all_reduce, tensors, opts.reduceOp)

    def allreduce_coalesced(self, tensors: _Tensors, opts: Any) -> _Works:
        """Reduce several tensors over all ranks, in place, with one agreement."""
        plan = collectives.all_reduce
        return self._run("all_reduce_coalesced", opts, plan, tensors, opts.reduceOp)

    def allreduce_sparse(self, tensors: _Tensors, opts: Any) -> _Works:
        """Add up a sparse tensor over all ranks, in place."""
        return self._run("all_reduce_sparse", opts, sparse.all_reduce, tensors, opts.reduceOp)

    def broadcast(self, tensors: _Tensors, opts: Any) -> _Works:
        """Copy the root's tensor to all ranks."""
        return self._run("broadcast", opts, collectives.broadcast, tensors, opts.rootRank)

    def reduce(self, tensors: _Tensors, opts: Any) -> _Works:
        """Reduce a tensor over all ranks, at the root."""
        plan = collectives.reduce
        return self._run("reduce", opts, plan, tensors, opts.reduceOp, opts.rootRank)

    def allgather(self, outputs: _Lists, inputs: _Tensors, opts: Any) -> _Works:
        """Gather the tensors of all ranks in a list on every rank."""
        return self._run("all_gather", opts, collectives.all_gather, outputs[0], inputs[0])

    def all_gather_single(self, output: torch.Tensor, mine: torch.Tensor, opts: Any) -> _Works:
        """Gather the tensors of all ranks in one tensor on every rank."""
        plan = collectives.all_gather_single
        return self._run("all_gather_single", opts, plan, output, mine)

    def allgather_coalesced(self, outputs: _Lists, inputs: _Tensors, opts: Any) -> _Works:
        """Gather several tensors of all ranks; outputs[rank][i] or outputs[i][rank] takes them."""
        return self._run("all_gather_coalesced", opts, collectives.all_gathers, outputs, inputs)

    def all_gather_single_coalesced(self, outputs: _Tensors, inputs: _Tensors, opts: Any) -> _Works:
        """Gather several tensors, each in one tensor, with one agreement."""
        plan = collectives.each(collectives.all_gather_single)
        return self._run("all_gather_single_coalesced", opts, plan, outputs, inputs)

    def gather(self, outputs: _Lists, inputs: _Tensors, opts: Any) -> _Works:
        """Gather the tensors of all ranks in a list at the root."""
        targets = outputs[0] if outputs else []
        plan = collectives.gather
        return self._run("gather", opts, plan, targets, inputs[0], opts.rootRank)

    def scatter(self, outputs: _Tensors, inputs: _Lists, opts: Any) -> _Works:
        """Give each rank one tensor of the root's list."""
        parts = inputs[0] if inputs else []
        plan = collectives.scatter
        return self._run("scatter", opts, plan, outputs[0], parts, opts.rootRank)

    def reduce_scatter(self, outputs: _Tensors, inputs: _Lists, opts: Any) -> _Works:
        """Reduce lists over all ranks and leave entry r on rank r."""
        plan = collectives.reduce_scatter
        return self._run("reduce_scatter", opts, plan, outputs[0], inputs[0], opts.reduceOp)

    def reduce_scatter_single(self, output: torch.Tensor, whole: torch.Tensor, opts: Any) -> _Works:
        """Reduce a tensor over all ranks and leave its r-th part on rank r."""
        plan = collectives.reduce_scatter_single
        return self._run("reduce_scatter_single", opts, plan, output, whole, opts.reduceOp)

    def reduce_scatter_single_coalesced(
        self, outputs: _Tensors, inputs: _Tensors, opts: Any
    ) -> _Works:
        """Reduce and scatter several tensors with one agreement."""
        plan = collectives.each(collectives.reduce_scatter_single)
        verb = "reduce_scatter_single_coalesced"
        return self._run(verb, opts, plan, outputs, inputs, opts.reduceOp)

    def alltoall(self, outputs: _Tensors, inputs: _Tensors, opts: Any) -> _Works:
        """Send inputs[r] to rank r, for all r."""
        return self._run("all_to_all", opts, all_to_all, outputs, inputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        whole: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any,
    ) -> _Works:
        """Send the r-th part of a tensor to rank r, for all r."""
        splits = (output_splits, input_splits)
        return self._run("all_to_all_single", opts, all_to_all_single, output, whole, *splits)

    def barrier(self, opts: Any) -> _Works:
        """Wait until all ranks have come."""
        return self._run("barrier", opts, collectives.barrier)

    def monitored_barrier(self, opts: Any, wait_all_ranks: bool = False) -> None:
        """Wait until all ranks have come; name those that did not.

        Raises:
            CollectiveTimeout: on every rank, if some rank did not come within the timeout.
        """
        group = self.group
        group.require_usable("monitored_barrier")
        asked = opts.timeout.total_seconds()
        # Here, unlike elsewhere, zero is a limit: look whether all have come, and do not wait.
        seconds = group.seconds if asked < 0 else asked
        self._round += 1
        step = self._round % ROUNDS
        tags = (ARRIVE + step, RELEASE + step)
        missing = arrive(group.comm, range(group.size), tags, seconds, wait_all_ranks)
        if missing is None or missing:
            group.littered = True
            raise verdict(group.name, group.rank, missing, seconds)

    # Point to point.

    def send(self, tensors: _Tensors, peer: int, tag: int) -> _Works:
        """Start to send a tensor to a rank of the group."""
        return self._keep(point_to_point.send(self.group, tensors, peer, tag))

    def recv(self, tensors: _Tensors, peer: int, tag: int) -> _Works:
        """Start to receive a tensor from a rank of the group."""
        return self._keep(point_to_point.receive(self.group, tensors, peer, tag))

    def recv_anysource(self, tensors: _Tensors, tag: int) -> _Works:
        """Start to receive a tensor from whichever rank sends one."""
        return self._keep(point_to_point.receive(self.group, tensors, MPI.ANY_SOURCE, tag))

    # Coalescing: verbs are carried out as they come; only the wait is for all of them.

    def start_coalescing(self) -> None:
        """Begin to keep the Works of the verbs that follow. Local."""
        self._coalesced = []

    def end_coalescing(self) -> Any:
        """Return one Work for all verbs since start_coalescing. Local."""
        works, self._coalesced = self._coalesced or [], None
        return Together(works)  # type: ignore[arg-type]

    # The life of the group.

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the limit of all verbs that follow. Local."""
        self.group.seconds = within_reason(timeout.total_seconds())
        self._options = _Options("mpi", timeout)

    def _set_sequence_number_for_group(self) -> None:
        """Keep it: 0."""

    def _get_sequence_number_for_group(self) -> int:
        return self.group.sequence

    def _wait_for_pending_works(self) -> None:
        self.group.drain(self.group.seconds)

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Do nothing: MPI has connected its ranks already."""

    def split(self, store: Any, ranks: Sequence[int], opts: Any) -> MPIBackend:
        """Make a group of some ranks of this one. Collective over those ranks."""
        self._splits += 1
        name = getattr(opts, "group_name", "") or f"{self.group.name}:split:{self._splits}"
        timeout = getattr(opts, "_timeout", None) or timedelta(seconds=self.group.seconds)
        seconds, tags = timeout.total_seconds(), (SPLIT, SPLIT + 1)
        comm = open_communicator(self.group.comm, list(ranks), name, seconds, tags)
        return MPIBackend(comm, name, timeout)

    def abort(self) -> None:
        """Refuse all further verbs. Local."""
        if not self.group.broken:
            self.group.tell_leaving()
        self.group.break_("it was aborted")

    def shutdown(self) -> None:
        """Carry out what is queued and free the communicator. Collective."""
        self.group.close()
        _open.discard(self)

    def _run(self, verb: str, opts: Any, make: Callable[..., Plan], *arguments: Any) -> _Works:
        group = self.group
        try:
            plan = make(group.comm, *arguments)
        except (TypeError, ValueError) as error:
            # The other ranks are about to wait for this one: they are told, not left waiting.
            plan = refuse(error)
        asynchronous = opts.asyncOp
        work = group.call(verb, plan, asynchronous, self._seconds(opts))
        return self._keep(work) if asynchronous else work

    def _keep(self, work: Any) -> Any:
        if self._coalesced is not None and work is not FINISHED:
            self._coalesced.append(work)
        return work

    def _seconds(self, opts: Any) -> float:
        seconds: float = opts.timeout.total_seconds()
        # torch means "not set" by a negative timeout.
        return within_reason(seconds) if seconds > 0 else self.group.seconds
