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

from lockstep.ending import SETTLE, within, within_reason
from lockstep.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    GroupBroken,
    LockstepError,
    MPIFailure,
)
from lockstep.meeting import Late
from lockstep.mpi_backend.agreement import Agreement, Plan
from lockstep.mpi_backend.team import NodeTeam, gather
from lockstep.mpi_backend.work import FINISHED, Finished, Pending
from lockstep.waiting import BACKGROUND, FOREGROUND, Patience, patience_here

if TYPE_CHECKING:
    from lockstep.mpi_backend.point_to_point import Message

_Item = tuple[str, Plan, float, Pending]


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
        if self._closed:
            self.require_usable(verb)
        # What hangs on the future of a verb runs in the thread that would have to carry this out.
        inside = threading.current_thread() is self._thread
        if (self._queued and not inside) or (asynchronous and self.threads):
            work = self._submit(verb, plan, seconds)
            if asynchronous:
                return work
            work.wait()
            return FINISHED
        with self._running:
            self._execute(verb, plan, seconds, patience_here())
        return Finished(plan.result) if asynchronous else FINISHED

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

    def _submit(self, verb: str, plan: Plan, seconds: float) -> Pending:
        self.require_usable(verb)
        work = Pending(self.label(verb), plan.result)
        with self._counting:
            self._queued += 1
            self._last = work
            self._queue.put((verb, plan, seconds, work))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._carry_out, name=f"lockstep-{self.name}", daemon=True
                )
                self._thread.start()
        return work

    def _carry_out(self) -> None:
        """Carry out the queue until it is told to stop; the thread of the group."""
        while (item := self._queue.get()) is not None:
            verb, plan, seconds, work = item
            error: BaseException | None = None
            try:
                with self._running:
                    self._execute(verb, plan, seconds, BACKGROUND)
            except BaseException as raised:
                error = raised
            with self._counting:
                self._queued -= 1
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
            raise self._mpi_failure(verb, error) from error
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
                raise self._late(verb, plan, seconds)
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
            raise self._late(verb, plan, seconds, late) from None
        if not same and (left := team.leavers()):
            raise self._deserted(verb, plan, left)
        if not same:
            text = plan.describe(verb, self.sequence)
            raise self._agreement.differ(text, plan.refusal, seconds, patience)
        if plan.refusal is not None:
            raise plan.refusal
        return here is not None

    def _deserted(self, verb: str, plan: Plan, left: list[int]) -> CollectiveMismatch:
        who = ", ".join(map(str, left))
        self.break_(f"rank {who} has left it")
        return CollectiveMismatch(
            f"{self.label(plan.describe(verb, self.sequence))} cannot end: rank {who} has left the "
            "group: it has closed it, or its program has ended",
            needed="all ranks of a group call the same verbs before they leave",
            cure=f"look for a return, an exit or a shorter loop on rank {who}",
        )

    def _late(
        self, verb: str, plan: Plan, seconds: float, late: Late | None = None
    ) -> CollectiveTimeout:
        what = self.label(plan.describe(verb, self.sequence))
        self.break_(f"{verb} #{self.sequence} timed out")
        if late is not None and late.gone:
            found = f"{what} cannot end: the process of rank {late.rank} is gone"
        elif late is not None and late.met:
            found = f"{what} hit its timeout of {seconds:g} s: rank {late.rank} has stopped in it"
        else:
            who = "not all ranks of the group have" if late is None else f"rank {late.rank} has not"
            found = f"{what} hit its timeout of {seconds:g} s: {who} called it"
        return CollectiveTimeout(
            found,
            needed="every rank of the group calls this verb",
            cure="look at what the other ranks print or do (py-spy dump --pid …); "
            "a longer timeout: init_process_group(…, timeout=timedelta(minutes=…))",
        )

    def _mpi_failure(self, what: str, error: MPI.Exception) -> MPIFailure:
        text = self.label(f"{what} #{self.sequence}")
        self.break_(f"{what} failed in MPI")
        return MPIFailure(
            f"{text} failed: MPI says: {error.Get_error_string()}",
            needed="a working MPI between all ranks of the group",
            cure="run `mpirun … python jobs/ptdist.py` on the same hosts to see whether MPI works",
        )
