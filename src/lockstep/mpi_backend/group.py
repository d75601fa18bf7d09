"""One process group: its communicator, and the order in which its verbs run.

A verb that the caller waits for runs in the caller's own thread when nothing is queued before it.
An asynchronous one is queued; the thread of the group carries out the queue in order, so that all
ranks have the same order whatever their threads do.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import TYPE_CHECKING

from mpi4py import MPI

from lockstep import notes
from lockstep.ending import SETTLE, within, within_reason
from lockstep.errors import (
    GroupBroken,
    LockstepError,
)
from lockstep.meeting import Late
from lockstep.mpi_backend.agreement import Agreement, Plan
from lockstep.mpi_backend.failures import deserted, late_error, mpi_failure
from lockstep.mpi_backend.team import NodeTeam, gather
from lockstep.mpi_backend.work import FINISHED, Finished, Pending
from lockstep.ranges import listed
from lockstep.waiting import BACKGROUND, FOREGROUND, Patience, patience_here
from lockstep.world import current

if TYPE_CHECKING:
    from lockstep.mpi_backend.point_to_point import Message

_Item = tuple[str, Plan, float, Pending, int]


class Group:
    """The ranks of one communicator and what is under way between them.

    Args:
        comm: the communicator of the members, for this group alone.
        name: the name torch gave the group.
        seconds: timeout of a verb in seconds.

    Attributes:
        rank: this process in the group.
        size: number of members.
        sequence: number of collective verbs called so far.
        inside: while a blocking call of MPI runs, when it must be over (seconds of
            time.monotonic) and what it is; see attendant.
        littered: a message may be left that nobody has received and nobody will.
        messages: sends and receives that are under way.
        threads: whether MPI allows a second thread to talk to it.
    """

    def __init__(self, comm: MPI.Intracomm, name: str, seconds: float) -> None:
        self.comm, self.name, self.seconds = comm, name, within_reason(seconds)
        self.rank, self.size = comm.rank, comm.size
        self.sequence = 0
        self.inside: tuple[float, str] | None = None
        self.littered = False
        self.messages: dict[int, Message] = {}
        self.threads = MPI.Query_thread() >= MPI.THREAD_MULTIPLE
        self._noted = f"{name}|{_members(comm)}"
        self._agreement = Agreement(comm)
        self._running = threading.Lock()
        self._counting = threading.Lock()
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._queued = 0
        self._last: Pending | None = None
        self._thread: threading.Thread | None = None
        self._team: NodeTeam | None = None
        self._asked_for_team = False
        self._broken = ""
        self._closed = False

    def call(self, verb: str, plan: Plan, asynchronous: bool, seconds: float) -> Finished | Pending:
        """Carry out a verb, or queue it. Collective over the group.

        Args:
            verb: its name.
            plan: what to do.
            asynchronous: return before the verb is over.
            seconds: limit of this call.

        Raises:
            LockstepError: whatever made the verb fail, if it ran in this thread.
        """
        recorder, at, queued = notes.current, -1, False
        if recorder is not None and self.size > 1:
            at = recorder.enter(self._noted, verb, plan.signature, plan.tensors, seconds)
        try:
            if self._closed:
                self.require_usable(verb)
            # What hangs on the future of a verb runs in the thread that would carry this out.
            other = self._queued and threading.current_thread() is not self._thread
            if other or (asynchronous and self.threads):
                queued, work = True, self._submit(verb, plan, seconds, at)
                if asynchronous:
                    return work
                work.wait()
                return FINISHED
            with self._running:
                self._execute(verb, plan, seconds, patience_here())
            return Finished(plan.result) if asynchronous else FINISHED
        finally:
            if at >= 0 and not queued and recorder is not None:
                recorder.leave(at)

    def label(self, what: str) -> str:
        """Name a verb, this group and this rank, for messages. Local."""
        return f"{what} on group {self.name!r} (rank {self.rank} of {self.size})"

    def require_usable(self, what: str) -> None:
        """Raise GroupBroken if the group cannot be used any more. Local."""
        if self._broken or self._closed:
            reason = self._broken or "it has been destroyed"
            raise GroupBroken(
                f"{self.label(what)}: the group cannot be used any more: {reason}",
                needed="a group on which no verb has timed out and which is not destroyed",
                cure="end the job and start it again, or open a new group",
            )

    @property
    def broken(self) -> str:
        """Why verbs on this group can never end, empty if they can."""
        return self._broken

    def break_(self, reason: str) -> None:
        """Refuse all further verbs: ranks no longer agree on what is under way. Local."""
        self._broken = self._broken or reason

    def drain(self, seconds: float) -> bool:
        """Wait until nothing is queued. Local. Returns False if it took longer."""
        return self._last is None or self._last.over.wait(seconds)

    def stop(self, seconds: float) -> bool:
        """Carry out what is queued and stop the thread. Local. Returns False if it hangs."""
        clean = self.drain(seconds)
        if self._thread is not None:
            self._queue.put(None)
            if clean:
                self._thread.join(seconds)
            self._thread = None
        return clean

    def tell_leaving(self) -> None:
        """Let ranks that still call a verb know that this one will not. Local."""
        if self._team is None or not self._running.acquire(blocking=False):
            return  # in the middle of a verb it is too late to say so
        try:
            self._team.leave()
        finally:
            self._running.release()

    def close(self) -> None:
        """End the group and free what it holds. Collective over the group."""
        if self._closed:
            return
        # From here on nothing is taken in any more; what is queued is still carried out.
        self._closed = True
        clean = self.stop(self.seconds)
        # The context of a communicator that is freed is used again, and a message left on it would
        # be taken for one of the next. So one that may not be empty is kept.
        if clean and not self._broken:
            self.tell_leaving()
        littered = self.littered or self._broken or self.messages or not clean
        if not littered and not self.comm.Iprobe():
            self.comm.Free()
        self._team = None

    def _submit(self, verb: str, plan: Plan, seconds: float, at: int) -> Pending:
        self.require_usable(verb)
        work = Pending(self.label(verb), plan.result)
        with self._counting:
            self._queued += 1
            self._last = work
            self._queue.put((verb, plan, seconds, work, at))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._carry_out, name=f"lockstep-{self.name}", daemon=True
                )
                self._thread.start()
        return work

    def _carry_out(self) -> None:
        """Carry out the queue until it is told to stop; the thread of the group."""
        while (item := self._queue.get()) is not None:
            verb, plan, seconds, work, at = item
            error: BaseException | None = None
            try:
                with self._running:
                    self._execute(verb, plan, seconds, BACKGROUND)
            except BaseException as raised:
                error = raised
            with self._counting:
                self._queued -= 1
            if at >= 0 and (recorder := notes.current) is not None:
                recorder.leave(at)
            work.finish(error)
            # The item holds the tensors; the next one may be long in coming.
            del item, plan, work, error

    def _execute(self, verb: str, plan: Plan, seconds: float, patience: Patience) -> None:
        if self._broken:
            self.require_usable(verb)
        self.sequence += 1
        try:
            if self.size == 1:
                if plan.refusal is not None:
                    raise plan.refusal
            elif self._meet(verb, plan, seconds, patience):
                return
            self.inside = (time.monotonic() + seconds, verb)
            plan.move()
        except MPI.Exception as error:
            raise mpi_failure(self, verb, error) from error
        except BaseException as error:
            # Unless all ranks got this verdict: they have been told that this one takes part, and
            # it does not. Going on, it would be one verb behind for ever.
            if error is not plan.refusal and not isinstance(error, LockstepError):
                self.break_(f"{verb} #{self.sequence} was left by {type(error).__name__}")
            raise
        finally:
            self.inside = None

    def _meet(self, verb: str, plan: Plan, seconds: float, patience: Patience) -> bool:
        """Wait until all ranks have called the same. Returns whether the verb is done already."""
        team = self._team
        if team is None:
            if not self._agreement.reach(verb, plan, self.sequence, seconds, patience):
                raise late_error(self, verb, plan, seconds)
            if not self._asked_for_team:
                # Now, since all ranks are here, and what follows blocks.
                self._asked_for_team = True
                with within(seconds + SETTLE, self.label("looking for ranks on this node")):
                    self._team = gather(self.comm)
            return False
        number, eager = plan.number(verb), patience is FOREGROUND
        # Whether it is done here must be the same on all ranks: it depends on what they have agreed
        # on, verb, dtype and operator, never on how this rank's tensors lie in memory.
        here = plan.on_node if team.dtypes.issuperset(plan.added) else None
        try:
            if here is None:
                same = team.meet(number, seconds, eager)
            else:
                same = here(team, number, seconds, eager)
        except Late as late:
            raise late_error(self, verb, plan, seconds, late) from None
        if not same and (left := team.leavers()):
            raise deserted(self, verb, plan, left)
        if not same:
            text = plan.describe(verb, self.sequence)
            raise self._agreement.differ(text, plan.refusal, seconds, patience)
        if plan.refusal is not None:
            raise plan.refusal
        return here is not None


def _members(comm: MPI.Intracomm) -> str:
    """Spell the world's ranks of a communicator for the notes, "" if there is no world. Local."""
    world = current()
    if world is None:
        return ""
    mine, all_ = comm.Get_group(), world.comm.Get_group()
    ranks = MPI.Group.Translate_ranks(mine, range(comm.size), all_)
    mine.Free()
    all_.Free()
    return listed(ranks)
