"""Agree, before any data moves, that all ranks of a group call the same verb.

Each rank reduces its call to one number. One non-blocking all-reduce over two integers tells every
rank whether all numbers are equal: the maximum of x is x, and the maximum of -x is -x. This costs
about a microsecond on a node and buys three things. The wait for a late rank has a limit, since it
is a loop over ``Test`` and not a call that cannot be left. The blocking calls of MPI that follow
start on all ranks at once, so that they may be used, which with some MPIs are twice as fast as the
non-blocking ones. And a rank that calls another verb, or the same verb with another shape, dtype,
operator or root, is found at once and named, on all ranks alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from mpi4py import MPI

from lockstep.errors import CollectiveMismatch, LockstepError, RefusedByPeer
from lockstep.notes import CHECK
from lockstep.waiting import Patience, wait_until

if TYPE_CHECKING:
    from lockstep.mpi_backend.on_node import OnNode

VERBS = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_single",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_single",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "all_reduce_coalesced",
    "all_gather_coalesced",
    "all_gather_single_coalesced",
    "reduce_scatter_single_coalesced",
    "all_reduce_sparse",
)
# Verbs whose tensors have the same shape on all ranks, if the program is in order. That only the
# number of elements is compared is enough for MPI; with LOCKSTEP_CHECK=1 the shapes are too.
_UNLIKE = {"all_to_all", "all_to_all_single", "barrier", "all_reduce_sparse", "reduce_scatter"}
_ALIKE = frozenset(VERBS) - _UNLIKE
_CODES = {verb: code for code, verb in enumerate(VERBS, start=1)}

_MASK = 2**62 - 1
# Larger than any number of a call, so that one refusal is seen by all.
_REFUSED = 2**62
# Larger still: the number of a rank that has left the group and will call nothing any more.
LEFT = 2**62 + 1
_TEXT = 512


# Not frozen: making a frozen one takes a microsecond longer, a tenth of a small all_reduce.
@dataclass(slots=True)
class Plan:
    """One call of a collective verb on this rank, not begun yet.

    Attributes:
        signature: what has to be the same on all ranks, as integers.
        move: does the communication; called once, when all ranks have agreed.
        tensors: this rank's tensors, for messages.
        note: the operator or root in words, for messages.
        result: what the future of the Work holds in the end.
        refusal: why this rank cannot take part; move is then never called.
        on_node: does what move does, and the agreement before it, where all ranks share a node;
            None if there is no such way.
        added: the dtypes that on_node adds up.
    """

    signature: tuple[int, ...]
    move: Callable[[], object]
    tensors: Sequence[torch.Tensor] = ()
    note: str = ""
    result: object = None
    refusal: Exception | None = None
    on_node: OnNode | None = None
    added: tuple[torch.dtype, ...] = ()

    def number(self, verb: str) -> int:
        """Return the number that stands for this call; the same on all ranks if the calls are."""
        if self.refusal:
            return _REFUSED
        shapes = tuple(tuple(t.shape) for t in self.tensors) if CHECK and verb in _ALIKE else ()
        return hash((_CODES[verb], *self.signature, *shapes)) & _MASK

    def describe(self, verb: str, number: int) -> str:
        """Say in words what this rank calls. Local."""
        verb = f"{verb} #{number}"
        if self.refusal is not None:
            first = str(self.refusal).splitlines()[0]
            return f"{verb} refused: {type(self.refusal).__name__}: {first}"
        shown = [f"{_dtype(t)}{list(t.shape)}" for t in self.tensors[:3]]
        if len(self.tensors) > 3:
            shown.append(f"… {len(self.tensors)} tensors")
        if self.note:
            shown.append(self.note)
        return f"{verb} ({', '.join(shown)})" if shown else verb


def refuse(error: Exception) -> Plan:
    """Make the plan of a rank whose arguments are wrong: it still tells the others. Local."""
    return Plan((), _nothing, refusal=error)


class Agreement:
    """The agreement of one group; not thread-safe, like the communicator it uses.

    Args:
        comm: the group's communicator.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._pair = np.zeros(2, dtype=np.int64)
        self._spec = [self._pair, 2, MPI.INT64_T]
        self._pending: MPI.Request | None = None

    def reach(self, verb: str, plan: Plan, number: int, seconds: float, patience: Patience) -> bool:
        """Wait until all ranks have called, and compare their calls. Collective.

        Args:
            verb: its name.
            plan: this rank's call.
            number: how many verbs this rank has called on the group; for messages only.
            seconds: limit.
            patience: how to wait.

        Returns:
            False if a rank did not come within the seconds; the communicator is lost then, since
            MPI cannot take back what this rank has told the others.

        Raises:
            CollectiveMismatch: the calls differ; on all ranks.
            RefusedByPeer: another rank refused its arguments. On that rank: its own error.
        """
        mine = plan.number(verb)
        pair = self._pair
        pair[0], pair[1] = mine, -mine
        self._pending = self._comm.Iallreduce(MPI.IN_PLACE, self._spec, MPI.MAX)
        if not wait_until(self._pending.Test, seconds, patience):
            return False
        if pair[0] != mine or pair[1] != -mine:
            raise self.differ(plan.describe(verb, number), plan.refusal, seconds, patience)
        if plan.refusal is not None:
            raise plan.refusal
        return True

    def differ(
        self, text: str, refusal: Exception | None, seconds: float, patience: Patience
    ) -> Exception:
        """Return the verdict on calls that are not the same. Collective.

        Args:
            text: what this rank called.
            refusal: why it cannot take part.
            seconds: limit.
            patience: how to wait.
        """
        own = text.encode()[:_TEXT].ljust(_TEXT)
        size = self._comm.size
        all_ = bytearray(_TEXT * size)
        self._pending = self._comm.Iallgather([own, MPI.BYTE], [all_, _TEXT, MPI.BYTE])
        if not wait_until(self._pending.Test, seconds, patience):
            return CollectiveMismatch(f"calls differ between ranks; this one called {text}")
        texts = [
            bytes(all_[i * _TEXT : (i + 1) * _TEXT]).decode(errors="ignore").rstrip()
            for i in range(size)
        ]
        if refusal is not None:
            return refusal
        return explain(texts, [" refused: " in text for text in texts])


def explain(texts: Sequence[str], refused: Sequence[bool]) -> LockstepError:
    """Turn the calls of all ranks into one verdict. Local.

    Args:
        texts: what each rank called, in words.
        refused: whether it refused its own arguments.
    """
    if any(refused):
        who = refused.index(True)
        verb, _, reason = texts[who].partition(" refused: ")
        return RefusedByPeer(
            f"rank {who} of the group refused its {verb}: {reason}",
            needed="arguments that every rank of the group can take",
            cure=f"look at what rank {who} passes to {verb}",
        )
    common, count = Counter(texts).most_common(1)[0]
    odd = [i for i, text in enumerate(texts) if text != common]
    listed = "; ".join(f"rank {i} called {texts[i]}" for i in odd[:8])
    more = f"; and {len(odd) - 8} others differ too" if len(odd) > 8 else ""
    others = "the others" if count > 1 else f"rank {texts.index(common)}"
    return CollectiveMismatch(
        f"the ranks of a group did not call the same: {listed}{more}, "
        f"where {others} called {common}",
        needed="all ranks of a group call the same verbs in the same order, with the same shapes",
        cure="look for a branch that depends on the rank or on the data before this call",
    )


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _nothing() -> None:
    return None
