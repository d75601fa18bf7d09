"""Note the calls over gloo, which knows nothing of the notes, by hooks of torch's.

torch calls a hook before and after it issues a collective, whoever asked for it: the user's code,
or DDP in C++. It does not say when a call is over; the call's handle has to be asked.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from lockstep import notes
from lockstep.ending import LONGEST, within
from lockstep.notes import CHECK
from lockstep.ranges import listed
from lockstep.watchdog.check import Comparison
from lockstep.world import World

# Those whose handle says when they are over; with which tensors they are told apart.
_VERBS = {
    "ALLREDUCE": ("all_reduce", "input_tensors"),
    "BROADCAST": ("broadcast", "input_tensors"),
    "REDUCE": ("reduce", "input_tensors"),
    "ALLGATHER": ("all_gather", "input_tensors"),
    "GATHER": ("gather", "input_tensors"),
    "SCATTER": ("scatter", "output_tensors"),
    "ALLTOALL": ("all_to_all", "input_tensors"),
    "BARRIER": ("barrier", "input_tensors"),
}
# Those whose handle does not: noted, but not as calls that last.
_MUTE = {"REDUCE_SCATTER": ("reduce_scatter", "output_tensors")}
# The name of our hooks among others of the group.
_NUMBER = int.from_bytes(b"lockstep"[:7], "big")
# Seconds for which a call that has failed is kept as what a rank does, unless it calls another.
_KEPT = 10.0
# What MPI may take to make a communicator.
_OPEN = 30.0


class Hooks:
    """Notes the collectives of a group, from the beginning, on all its ranks alike. Local.

    The group is not held: its program may destroy it.

    Args:
        group: nothing was called on it.
        seconds: its timeout.
        noted: note the calls.
        comparison: compares them before, if they are to be compared; then they are Collective.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        seconds: float,
        *,
        noted: bool = True,
        comparison: Comparison | None = None,
    ) -> None:
        self._group, self._seconds = id(group), seconds
        self._noted, self._comparison = noted, comparison
        self._name = f"{group.group_name}|{listed(range(group.size()))}"
        # by thread, the call that it is issuing; and by place in the notes, what is under way, and
        # when it was seen that it has failed
        self._issuing: dict[int, int] = {}
        self._under_way: dict[int, dist.Work] = {}
        self._failed: dict[int, float] = {}
        group.register_pre_hook(_NUMBER, self._before)
        group.register_post_hook(_NUMBER, self._after)

    def look(self, *, failed: bool = False) -> None:
        """Note which calls are over.

        Args:
            failed: also those that have failed. As long as nothing else is called, such a call is
                what a verdict has to tell of.
        """
        if not failed and self._mine() is None:
            self.close()
        for at, work in list(self._under_way.items()):
            if not work.is_completed():
                continue
            if not failed and _has_failed(work):
                since = self._failed.setdefault(at, time.monotonic())
                if time.monotonic() - since < _KEPT:
                    _leave(at, notes.FAILED)
                    continue
            if self._under_way.get(at) is work:
                self._forget(at)
                _leave(at)

    def close(self) -> None:
        """Note nothing more."""
        if (group := self._mine()) is not None:
            group.unregister_pre_hook(_NUMBER)
            group.unregister_post_hook(_NUMBER)
        for at in list(self._under_way):
            self._forget(at)
            _leave(at)

    def _before(self, args: Any) -> None:
        kind = args.name.name
        if (found := _VERBS.get(kind) or _MUTE.get(kind)) is None:
            return
        verb, which = found
        tensors, recorder = getattr(args, which), notes.current
        at = -1
        if recorder is not None and self._noted:
            self.look(failed=True)
            signature = tuple((t.dtype, t.numel()) for t in tensors)
            at = recorder.enter(self._name, verb, signature, tensors, self._seconds)
            self._forget(at)
        self._issuing[threading.get_ident()] = at
        try:
            if self._comparison is not None:
                self._comparison.compare(verb, tensors, args.root)
        finally:
            # To issue it takes no time; if that raises an error, nobody is told.
            _leave(at, notes.NOT_ISSUED)

    def _after(self, args: Any) -> None:
        at = self._issuing.pop(threading.get_ident(), -1)
        recorder, work = notes.current, args.work
        if at < 0 or recorder is None:
            return
        if work is None or args.name.name in _MUTE or work.is_completed():
            _leave(at)
        else:
            self._under_way[at] = work
            recorder.qualify(at, notes.ASKED_AGAIN)

    def _mine(self) -> dist.ProcessGroup | None:
        """Return the group, unless the program has destroyed it."""
        group = dist.group.WORLD if dist.is_initialized() else None
        return group if id(group) == self._group else None

    def _forget(self, at: int) -> None:
        self._under_way.pop(at, None)
        self._failed.pop(at, None)


@contextmanager
def hooked(
    world: World, seconds: float, *, noted: bool = True, patient: bool = False
) -> Iterator[Hooks | None]:
    """Note the calls of the default group if it is gloo's. Local; on all ranks alike.

    With LOCKSTEP_CHECK=1 they are compared too, as those over nccl are; the backend mpi does so
    itself. Then opening it is Collective.

    Args:
        world: the ranks.
        seconds: the group's timeout.
        noted: False to compare them alone.
        patient: wait for ever for a rank that is late.
    """
    group = dist.group.WORLD if dist.is_initialized() and world.size > 1 else None
    backend = dist.get_backend(group) if group is not None else ""
    noted, compared = noted and backend == "gloo", CHECK and backend in ("gloo", "nccl")
    if group is None or not (noted or compared):
        yield None
        return
    comparison = None
    if compared:
        with within(_OPEN, "opening the comparison of calls"):
            comparison = Comparison(world.comm.Dup(), LONGEST if patient else seconds)
    hooks = Hooks(group, seconds, noted=noted, comparison=comparison)
    del group
    try:
        yield hooks
    finally:
        hooks.close()


def _has_failed(work: dist.Work) -> bool:
    try:
        work.wait()  # for nobody: it is completed
    except Exception:
        return True
    return False


def _leave(at: int, how: int = 0) -> None:
    if at < 0 or notes.current is None:
        return
    if how:
        notes.current.qualify(at, how)
    else:
        notes.current.leave(at)
