"""Sends and receives: non-blocking always, so that two ranks may send to each other first.

A message is looked after by whoever waits for it, and from time to time by the attendant, which
keeps long messages moving while the caller computes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from mpi4py import MPI
from torch.futures import Future

from lockstep import notes
from lockstep.ending import within_reason
from lockstep.errors import CollectiveTimeout, LockstepError, MPIFailure
from lockstep.mpi_backend.buffers import blocks, check, check_written, flat, give_back, memory
from lockstep.mpi_backend.group import Group
from lockstep.mpi_backend.tags import user_tag
from lockstep.mpi_backend.work import asked, later
from lockstep.waiting import patience_here, wait_until

if TYPE_CHECKING:
    _Work = object
else:
    from torch._C._distributed_c10d import Work as _Work


class Message(_Work):
    """A send or a receive under way.

    Args:
        group: whose communicator it travels on.
        tensor: the caller's tensor.
        staged: the contiguous tensor that MPI reads or writes.
        peer: the other rank, or MPI.ANY_SOURCE.
        tag: as MPI sees it.
    """

    def __init__(
        self, group: Group, tensor: torch.Tensor, staged: torch.Tensor, peer: int, tag: int
    ) -> None:
        super().__init__()
        self._group, self._peer, self._tag = group, peer, tag
        self._tensor, self._staged = tensor, staged
        self._request: MPI.Request | None = None
        self._status = MPI.Status()
        self._receiving = False
        self._over = False
        self._error: LockstepError | None = None
        self._futures: tuple[Future, Future] | None = None
        self._told = False
        self._looking = threading.Lock()
        self.source = -1
        self.since = time.monotonic()

    def begin(self, *, receiving: bool) -> Message:
        """Start to send or to receive. Local."""
        self._receiving = receiving
        start = self._group.comm.Irecv if receiving else self._group.comm.Isend
        with blocks(self._staged.nbytes) as (count, kind):
            self._request = start([memory(self._staged), count, kind], self._peer, self._tag)
        self._group.messages[id(self)] = self
        return self

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the message has left this rank, or has come. Local.

        Args:
            timeout: how long to wait; the message goes on when it is over. None or zero: as long
                as the group's timeout says; when that is over, the message is given up.

        Raises:
            CollectiveTimeout: the time is over.
            MPIFailure: MPI reported an error, or the message was shorter than the tensor.
        """
        if not self._over and not self.look():
            asked_for = timeout.total_seconds() if timeout is not None else 0.0
            seconds = within_reason(asked_for) if asked_for > 0 else self._group.seconds
            with self._noted(seconds):
                if not wait_until(self.look, seconds, patience_here()):
                    notes.explain()
                    if asked_for > 0:
                        raise self._timeout(seconds)
                    self._give_up(seconds)
        if self._error is not None:
            raise self._error
        return True

    def look(self) -> bool:
        """Ask MPI whether the message is over, and finish it if so. Local; any thread."""
        if self._over:
            return True
        # A request must not be tested by two threads at once; the other one will see the end.
        if not self._looking.acquire(blocking=False):
            return False
        try:
            if not self._over and self._test():
                self._finish()
        finally:
            self._looking.release()
        if self._over and self._futures is not None and not self._told:
            # Outside of the lock: what hangs on the future may ask for this message again.
            self._told = True
            self._futures[0].set_result(None)
        return self._over

    def is_completed(self) -> bool:
        """Say whether the message is over. Local."""
        return self.look()

    def failure(self) -> BaseException | None:
        """Return what made the message fail, if something did. Local."""
        return self._error

    def source_rank(self) -> int:
        """Return the rank that the message came from, once it is over. Local."""
        return self.source

    def get_future(self) -> Future:
        """Return a future that is done when the message is over. Local."""
        asked.work = self
        with self._looking:
            new, self._futures = self._futures is None, self._futures or later(self._outcome)
            switch, future = self._futures
            late = new and self._over
            self._told = self._told or late
        if late:
            switch.set_result(None)
        return future

    def _deliver(self) -> None:
        """Put what came where the caller wants it; this may run in the attendant's thread."""
        try:
            give_back(self._staged, self._tensor)
        except Exception as error:
            self._error = MPIFailure(
                f"{self._label()} came, but could not be put into the tensor: {error}",
                needed="a tensor that still has the size it had when the receive was called",
                cure="leave a tensor alone until wait() has returned",
            )

    def _label(self) -> str:
        what = f"{self._tensor.dtype}{list(self._tensor.shape)}"
        who = "any rank" if self._peer == MPI.ANY_SOURCE else f"rank {self._peer}"
        verb = f"recv of {what} from {who}" if self._receiving else f"send of {what} to {who}"
        return self._group.label(f"{verb}, tag {self._tag},")

    @contextmanager
    def _noted(self, seconds: float) -> Iterator[None]:
        """Tell the watchdog that this rank waits here."""
        recorder = notes.current
        if recorder is None:
            yield
            return
        who = "any rank" if self._peer == MPI.ANY_SOURCE else f"rank {self._peer}"
        verb = f"recv from {who}" if self._receiving else f"send to {who}"
        key, tensors = (self._tag, self._tensor.dtype, self._tensor.numel()), (self._tensor,)
        at = recorder.enter(notes.MESSAGES, f"{verb}, tag {self._tag}", key, tensors, seconds)
        try:
            yield
        finally:
            recorder.leave(at)

    def _test(self) -> bool:
        try:
            return self._request is None or self._request.Test(self._status)
        except MPI.Exception as error:
            self._error = MPIFailure(
                f"{self._label()} failed: MPI says: {error.Get_error_string()}",
                needed="a message as long as the tensor that receives it",
                cure="compare shape and dtype on both sides",
            )
            return True

    def _finish(self) -> None:
        if self._receiving and self._error is None:
            self.source = self._status.Get_source()
            came = self._status.Get_count(MPI.BYTE)
            if came != self._staged.nbytes and self._staged.nbytes < 2**30:
                self._error = MPIFailure(
                    f"{self._label()}: {came} bytes came from rank {self.source} "
                    f"for a tensor of {self._staged.nbytes}",
                    needed="a message as long as the tensor that receives it",
                    cure="compare shape and dtype on both sides",
                )
            else:
                self._deliver()
        self._over = True
        self._group.messages.pop(id(self), None)

    def _outcome(self) -> list[torch.Tensor]:
        if self._error is not None:
            raise self._error
        return [self._tensor]

    def _give_up(self, seconds: float) -> None:
        if self._receiving and self._request is not None:
            self._request.Cancel()
            self._group.littered = True
            # After a cancel the end is near: either the cancel took hold, or the message is there.
            if wait_until(self.look, 5.0) and not self._status.Is_cancelled() and not self._error:
                return
        else:
            self._group.break_(f"{self._label()} timed out")
        self._error = self._timeout(seconds)

    def _timeout(self, seconds: float) -> CollectiveTimeout:
        return CollectiveTimeout(
            f"{self._label()} hit its timeout of {seconds:g} s",
            needed="the peer calls the matching verb with the same tag",
            cure="look at what the peer prints or does; check the order of sends and receives",
        )


def send(group: Group, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> Message:
    """Start to send a tensor to a rank of the group. Local.

    Args:
        tensors: one tensor on the CPU, any shape and dtype, contiguous or not.
        peer: rank in the group.
        tag: told apart from other messages by it.

    Raises:
        TypeError, ValueError: naming the argument that is wrong.
        GroupBroken: the group cannot be used any more.
    """
    tensor, tag = _checked(group, tensors, peer, tag, "send to")
    return Message(group, tensor, flat(tensor), peer, tag).begin(receiving=False)


def receive(group: Group, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> Message:
    """Start to receive a tensor from a rank of the group, or from MPI.ANY_SOURCE. Local.

    Args and errors as for `send`.
    """
    tensor, tag = _checked(group, tensors, peer, tag, "receive from")
    check_written(tensors)
    return Message(group, tensor, flat(tensor), peer, tag).begin(receiving=True)


def _checked(
    group: Group, tensors: Sequence[torch.Tensor], peer: int, tag: int, what: str
) -> tuple[torch.Tensor, int]:
    group.require_usable(what)
    check(tensors)
    if len(tensors) != 1:
        raise ValueError(
            f"{len(tensors)} tensors were given to one {what}\n"
            "  needed: one tensor a message\n  to do:  call once for each tensor"
        )
    if peer != MPI.ANY_SOURCE and not 0 <= peer < group.size:
        raise ValueError(
            f"cannot {what} rank {peer}\n"
            f"  needed: a rank from 0 to {group.size - 1}\n  to do:  check the peer's rank"
        )
    return tensors[0], user_tag(group.comm, tag)
