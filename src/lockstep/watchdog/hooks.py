"""Note the calls over gloo, which knows nothing of the notes, by hooks of torch's.

torch calls a hook before and after it issues a collective, whoever asked for it: the user's code,
or DDP in C++. It does not say when a call is over; the call's handle has to be asked.
"""

from __future__ import annotations

import threading
from typing import Any

import torch.distributed as dist

from lockstep import notes
from lockstep.ranges import listed

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
_NUMBER = int.from_bytes(b"lockstep"[:7], "big")


class Hooks:
    """Notes the collectives of a group, from the beginning, on all its ranks alike. Local.

    Args:
        group: of gloo's; nothing was called on it.
        seconds: its timeout.
    """

    def __init__(self, group: dist.ProcessGroup, seconds: float) -> None:
        self._group, self._seconds = group, seconds
        self._name = f"{group.group_name}|{listed(range(group.size()))}"
        # by thread, the call that it is issuing; and by place in the notes, what is under way
        self._issuing: dict[int, int] = {}
        self._under_way: dict[int, dist.Work] = {}
        group.register_pre_hook(_NUMBER, self._before)
        group.register_post_hook(_NUMBER, self._after)

    def look(self, *, failed: bool = False) -> None:
        """Note which calls are over.

        Args:
            failed: also those that have failed. As long as nothing else is called, such a call is
                what a verdict has to tell of.
        """
        for at, work in list(self._under_way.items()):
            over = work.is_completed() and (failed or not _has_failed(work))
            if over and self._under_way.get(at) is work:
                del self._under_way[at]
                _leave(at)

    def close(self) -> None:
        """Note nothing more."""
        self._group.unregister_pre_hook(_NUMBER)
        self._group.unregister_post_hook(_NUMBER)
        for at in [*self._issuing.values(), *self._under_way]:
            _leave(at)
        self._issuing.clear()
        self._under_way.clear()

    def _before(self, args: Any) -> None:
        recorder, kind = notes.current, args.name.name
        if recorder is None or (found := _VERBS.get(kind) or _MUTE.get(kind)) is None:
            return
        if (at := self._issuing.pop(threading.get_ident(), -1)) >= 0:
            _leave(at)  # it has ended by an error before there was a handle
        self.look(failed=True)
        verb, which = found
        tensors = getattr(args, which)
        signature = tuple((t.dtype, t.numel()) for t in tensors)
        at = recorder.enter(self._name, verb, signature, tensors, self._seconds)
        recorder.ask_again(at)
        self._under_way.pop(at, None)
        self._issuing[threading.get_ident()] = at

    def _after(self, args: Any) -> None:
        at = self._issuing.pop(threading.get_ident(), -1)
        if at < 0:
            return
        if args.work is None or args.name.name in _MUTE or args.work.is_completed():
            _leave(at)
        else:
            self._under_way[at] = args.work


def hooked(seconds: float) -> Hooks | None:
    """Note the calls of the default group if it is gloo's. Local; on all ranks alike.

    Args:
        seconds: its timeout.
    """
    group = dist.group.WORLD if dist.is_initialized() else None
    return Hooks(group, seconds) if group and dist.get_backend(group) == "gloo" else None


def _has_failed(work: dist.Work) -> bool:
    try:
        work.wait()  # for nobody: it is completed
    except Exception:
        return True
    return False


def _leave(at: int) -> None:
    if notes.current is not None:
        notes.current.leave(at)
