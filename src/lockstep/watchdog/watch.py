"""Open and close the watch over a session's ranks."""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lockstep import ending, notes
from lockstep.ending import within
from lockstep.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    GroupBroken,
    LockstepError,
    MPIFailure,
    RendezvousError,
    SettingsError,
)
from lockstep.rendezvous.doors import open_door
from lockstep.rendezvous.tcp import find_address, where_to_listen
from lockstep.watchdog.channel import Channel
from lockstep.watchdog.farewell import Farewell
from lockstep.watchdog.hooks import hooked
from lockstep.watchdog.hub import Hub, Ranks
from lockstep.watchdog.limits import Limits
from lockstep.watchdog.node import REPORTERS
from lockstep.watchdog.printing import say
from lockstep.watchdog.watcher import Watcher
from lockstep.watchdog.witness import present
from lockstep.world import World

if TYPE_CHECKING:
    from mpi4py import MPI

# abort: after the verdict the job ends. wait: it goes on waiting. off: nobody watches.
MODE = "LOCKSTEP_WATCHDOG"
# Seconds after which a call that stands is told of.
WARN = "LOCKSTEP_WARN"
# What MPI may take to make the watch's own communicator and memory, once all ranks have come.
_OPEN = 30.0
# Errors of a rank that has done nothing wrong itself, as far as it knows; and those of torch's.
_OF_OTHERS = (CollectiveTimeout, CollectiveMismatch, GroupBroken, MPIFailure)
_SIGNS = ("timed out", "timeout", "closed by peer", "reset by peer", "broken pipe", "gloo/")

_watcher: Watcher | None = None


def mode() -> str:
    """Return what the environment asks for: abort, wait or off. Local.

    Raises:
        SettingsError: it asks for something else.
    """
    asked = os.environ.get(MODE, "abort")
    if asked not in ("abort", "wait", "off"):
        raise SettingsError(
            f"{MODE}={asked}", needed="abort, wait or off", cure=f"unset {MODE}, or correct it"
        )
    return asked


def unusual() -> str:
    """Return what the environment asks for that changes what ranks do together, spelled. Local."""
    usual = {MODE: "abort", "LOCKSTEP_CHECK": "0"}
    asked = {name: os.environ.get(name, value) for name, value in usual.items()}
    return "".join(f", {name}={it}" for name, it in asked.items() if it != usual[name])


def _warn(limit: float) -> float:
    asked = os.environ.get(WARN, "")
    try:
        seconds = float(asked) if asked else min(60.0, limit / 4)
    except ValueError:
        seconds = -1.0
    if seconds <= 0:
        raise SettingsError(f"{WARN}={asked}", needed="seconds, above 0", cure=f"{WARN}=30")
    return seconds


@contextmanager
def watched(world: World, seconds: float) -> Iterator[None]:
    """Watch the ranks for the length of a ``with``. Collective, after all ranks have met.

    Args:
        world: the ranks.
        seconds: limit of what has none of its own.
    """
    global _watcher
    asked = mode()
    _dismiss()
    ending.farewell = None
    # Before the end of MPI, in which a rank waits for the others and cannot say that it has left.
    # What is registered last runs first.
    atexit.unregister(_end)
    atexit.register(_end)
    if world.size == 1 or asked == "off":
        with hooked(world, seconds, noted=False):
            yield
        return
    notes.session_limit = seconds
    limits = Limits(_warn(seconds), seconds, asked == "wait")
    with within(_OPEN, "opening the watch"):
        _watcher = _open(world, limits)
    if _watcher is None:
        with hooked(world, seconds, noted=False):
            yield
        return
    if asked == "abort":
        ending.farewell = Farewell(_watcher.segment, _watcher.ranks, world.host, limits)
    with (
        _signals(_watcher),
        present(_watcher.segment, world.host, _watcher.ranks),
        hooked(world, seconds, patient=limits.wait) as _watcher.hooks,
        _noting(_watcher),
    ):
        yield
    # The thread goes on: other ranks may still wait for this one, and somebody has to say so.


@contextmanager
def _noting(watcher: Watcher) -> Iterator[None]:
    """Note what this rank calls, and how it leaves the session."""
    recorder = watcher.recorder
    notes.current, notes.ask = recorder, watcher.explain
    try:
        yield
        recorder.set(notes.STATE, notes.CLOSED)
    except BaseException as error:
        _note_end(recorder, error)
        raise
    finally:
        if watcher.hooks is not None:
            watcher.hooks.close()
            watcher.hooks = None
        notes.no_step()
        notes.current = None


def _note_end(recorder: notes.Recorder, error: BaseException) -> None:
    """Note how the session is left, and where."""
    recorder.hold(error.__traceback__)
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        recorder.set(notes.CODE, code)
        recorder.set(notes.STATE, notes.EXITED if code else notes.CLOSED)
        return
    ours = _is_one_of(_OF_OTHERS, error)
    if _is_one_of((CollectiveMismatch,), error) or (not ours and _is_late(error)):
        notes.explain()  # the others have had their verdict
        ours = True
    recorder.set(notes.STATE, notes.GAVE_UP if ours else notes.RAISED)


def _is_one_of(kinds: tuple[type[LockstepError], ...], error: BaseException) -> bool:
    """Say whether it is such an error; DDP has but the text of it, in an error of torch's."""
    text = str(error) if type(error) is RuntimeError else ""
    return isinstance(error, kinds) or any(f"{kind.__name__}: " in text for kind in kinds)


def _is_late(error: BaseException) -> bool:
    """Say whether an error of torch's means that another rank is late, gone, or calls another."""
    text = str(error).lower()
    torchs = isinstance(error, RuntimeError) and not isinstance(error, LockstepError)
    return torchs and any(sign in text for sign in _SIGNS)


def _open(world: World, limits: Limits) -> Watcher | None:
    """Make the notes of the node and the connections to the root. Collective."""
    # Not at the top: it loads MPI, which the import of this package must not.
    from lockstep.shared_memory import Segment

    local: MPI.Intracomm = world.comm.Split(world.node, world.rank)  # type: ignore[assignment]
    try:
        segment = Segment(local, notes.BYTES, "the watchdog's notes", keep=world.local_rank == 0)
    except LockstepError:
        segment = None
    ranks = local.allgather(world.rank)
    if not all(world.comm.allgather(segment is not None)):
        local.Free()
        if world.rank == 0:
            say("lockstep: no watchdog: the ranks of a node cannot share memory")
        return None
    assert segment is not None
    channel, hub = _connect(world)
    watcher = Watcher(segment, ranks, world.host, channel=channel, limits=limits, hub=hub)
    local.Barrier()  # the process ids are written
    local.Free()
    watcher.start()
    return watcher


def _connect(world: World) -> tuple[Channel | None, Hub | None]:
    """Connect the first two ranks of each node to the root. Collective."""
    door = open_door(0, where_to_listen(world)) if world.rank == 0 else None
    mine = (door.port, door.number, secrets.token_hex(16)) if door else None
    port, number, token = world.comm.bcast(mine, root=0)
    where = world.comm.allgather((world.host, world.node))
    try:
        address = find_address(world, door, "", port, number)
    except RendezvousError:
        address = ""  # then every node speaks for itself
    hub = None
    if door is not None:
        ranks = Ranks([host for host, _ in where], [node for _, node in where])
        hub = Hub(door.socket, token, ranks, lambda: notes.directory)
    channel = None
    if world.local_rank < REPORTERS:
        channel = _call_root(address, port, token, world.node)
    world.comm.Barrier()
    return channel, hub


def _call_root(address: str, port: int, token: str, node: int) -> Channel:
    try:
        channel = Channel(socket.create_connection((address, port), timeout=5.0))
    except OSError:
        ours, _ = socket.socketpair()
        channel = Channel(ours)
        channel.open = False
        return channel
    channel.send(token=token, node=node)
    return channel


@contextmanager
def _signals(watcher: Watcher) -> Iterator[None]:
    """Let SIGQUIT ask for the verdict, unless the program has a use for it."""
    with contextlib.ExitStack() as stack:
        # Only the main thread may, and only if nobody else has.
        with contextlib.suppress(ValueError):
            usual = signal.getsignal(signal.SIGQUIT)
            # A shell script that starts a job with & has it ignored, for no reason of the job's.
            if usual in (signal.SIG_DFL, signal.SIG_IGN):
                watcher.wake.setblocking(False)
                before = signal.set_wakeup_fd(watcher.wake.fileno(), warn_on_full_buffer=False)
                if before != -1:
                    signal.set_wakeup_fd(before)
                else:
                    signal.signal(signal.SIGQUIT, _nothing)
                    stack.callback(signal.signal, signal.SIGQUIT, usual)
                    stack.callback(signal.set_wakeup_fd, -1)
        yield


def _nothing(number: int, frame: Any) -> None:
    """The number has been written to the watcher already."""


def _dismiss(*, ending: bool = False) -> None:
    """Let go of the watch over an earlier session, because of another one or at the end."""
    global _watcher
    notes.ask = None
    if _watcher is not None:
        _watcher.close(ending=ending)
        _watcher = None


def _end() -> None:
    _dismiss(ending=True)


def _after_fork() -> None:
    """The notes are those of the parent."""
    global _watcher
    _watcher = None
    notes.current = notes.ask = None


os.register_at_fork(after_in_child=_after_fork)
