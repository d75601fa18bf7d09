"""Compare what the ranks call before every collective, where the backend does not do so itself."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from lockstep import notes
from lockstep.errors import CollectiveTimeout
from lockstep.waiting import patience_here

if TYPE_CHECKING:
    from mpi4py import MPI


class Comparison:
    """Compares the calls of the ranks of a group, in the order in which they make them.

    Args:
        comm: of the ranks, for this alone.
        seconds: how long a rank may be late.
    """

    def __init__(self, comm: MPI.Intracomm, seconds: float) -> None:
        # Not at the top: it loads MPI, which the import of this package must not.
        from lockstep.mpi_backend.agreement import Agreement

        self._agreement, self._seconds = Agreement(comm), seconds
        self._number, self._lost = 0, False

    def compare(self, verb: str, tensors: Sequence[torch.Tensor], root: int) -> None:
        """Go on if all ranks call the same. Collective.

        Args:
            verb: its name.
            tensors: of this rank; shapes are compared of verbs that have the same on all ranks.
            root: a rank, or -1.

        Raises:
            CollectiveMismatch: the calls differ; on all ranks.
            CollectiveTimeout: a rank did not come.
        """
        from lockstep.mpi_backend.agreement import Plan

        if self._lost:
            return  # torch's own timeout is left
        self._number += 1
        # hash() of a text is another one in each process
        kinds = [zlib.crc32(str(tensor.dtype).encode()) for tensor in tensors[:1]]
        note = f"root {root}" if root >= 0 else ""
        plan = Plan((root, *kinds), lambda: None, tensors, note)
        here = patience_here()
        if not self._agreement.reach(verb, plan, self._number, self._seconds, here):
            self._lost = True
            notes.explain()  # before the call is over
            raise CollectiveTimeout(
                f"{plan.describe(verb, self._number)} waited {self._seconds:g} s for other ranks",
                needed="every rank calls it",
                cure="look at where the verdict says that the late rank is",
            )
