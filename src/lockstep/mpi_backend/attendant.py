"""A thread that looks after what no caller is looking after.

It keeps long messages moving while the caller computes, completes futures of messages that nobody
waits for, and ends the job, with a verdict, when a blocking call of MPI outlasts the limit of its
verb. Such a call cannot be left from within: a host that is cut off in the middle of an all-reduce
leaves the others in it for ever.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref

from lockstep.ending import abort
from lockstep.mpi_backend.group import Group

_IDLE = 0.05
_BUSY = 0.002
# A call gets this long beyond its limit, so that an orderly error has precedence.
_GRACE = 5.0

_groups: weakref.WeakSet[Group] = weakref.WeakSet()
# Groups on which a verb can never end outlive their use: the end of the process has to know.
_broken: set[Group] = set()
_lock = threading.Lock()
_stop = threading.Event()
_thread: threading.Thread | None = None
_forked = False


def attend(group: Group) -> None:
    """Look after a group until it is gone. Local."""
    global _thread
    with _lock:
        _groups.add(group)
        if _thread is None:
            _stop.clear()
            _thread = threading.Thread(target=_look_round, name="lockstep-attendant", daemon=True)
            _thread.start()


def dismiss() -> None:
    """Stop looking, since MPI is about to end. Local."""
    global _thread
    _stop.set()
    if _thread is not None:
        _thread.join(2.0)
    _thread = None


def forked() -> bool:
    """Say whether this process is a fork of the one that opened its groups. Local."""
    return _forked


def _after_fork() -> None:
    """MPI and its threads belong to the parent; the child must not take its place."""
    global _forked
    _forked = True
    for group in list(_groups):
        group.break_("this process is a fork of the rank that opened it")


os.register_at_fork(after_in_child=_after_fork)


def groups() -> list[Group]:
    """Return the groups that are looked after. Local."""
    with _lock:
        return list(_groups | _broken)


def _look_round() -> None:
    pause = _IDLE
    while not _stop.wait(pause):
        now = time.monotonic()
        busy = [_look_after(group, now) for group in groups()]
        pause = _BUSY if any(busy) else _IDLE


def _look_after(group: Group, now: float) -> bool:
    if group.broken:
        with _lock:
            _broken.add(group)
    inside = group.inside
    if inside is not None and now > inside[0] + _GRACE:
        _end_with_verdict(group, inside[1])
    if not group.threads:
        return False
    # A message that its caller waits for right now is none of our business.
    waiting = [message for message in list(group.messages.values()) if now - message.since > _BUSY]
    still = [message for message in waiting if not message.look()]
    return bool(still)


def _end_with_verdict(group: Group, verb: str) -> None:
    sys.stderr.write(
        f"lockstep: {group.label(f'{verb} #{group.sequence}')} was begun by all ranks and did not "
        f"end within the {group.seconds:g} s of the group: a rank or the network has failed.\n"
        "  to do:  look for a dead host or a cut link; the job is ended now\n"
    )
    abort(1)
