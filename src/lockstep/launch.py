"""Run a job so that all ranks end together.

One rank that fails must not leave the others waiting for it. `run` is the last line of every job;
for scripts that never heard of Lockstep, `die_together` does what can be done from outside of
``main``: an exception that nobody caught ends the whole job.
"""

from __future__ import annotations

import atexit
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NoReturn

from lockstep.ending import abort, flush
from lockstep.errors import LaunchError, LockstepError
from lockstep.notes import is_the_users
from lockstep.waiting import wait_until
from lockstep.world import World, current

# Ranks that end with a code of their own wait this long for the others to end likewise, so that a
# planned end (all ranks return 85) is not made to look like a crash.
_GRACE = 1.0

_failed = False
_pid = 0
_installed = False


def run(main: Callable[..., int | None], argv: Sequence[str] | None = None) -> NoReturn:
    """Run a job's main on this rank and end the process; if it fails, end the whole job.

    Call it as the last line of a job, ``run(main)``. An exception prints this rank's traceback
    first and then ends all ranks within seconds, as does a code other than 0 that the other ranks
    do not share. MPI is not started by this function: a job that only prints its help never does.
    Collective, if main has started MPI.

    Args:
        main: takes the arguments (None: those of the command line) or nothing, returns the exit
            code; None counts as 0.
        argv: arguments for main.
    """
    try:
        code = (main(argv) if inspect.signature(main).parameters else main()) or 0
    except SystemExit as exit_:
        code = _exit_code(exit_)
    except KeyboardInterrupt:
        _say("interrupted (Ctrl-C)")
        _end_all(130)
    except BaseException as error:
        _report(error)
        _end_all(1)
    if code and not _others_leave_too():
        _say(f"leaves with code {code} while other ranks go on: ending the job")
        _end_all(code)
    sys.exit(code)


def die_together() -> None:
    """See to it that an exception that nobody catches ends the job on all ranks. Local.

    The hook only takes a note; the job is ended at the exit of the interpreter, after every other
    hook has printed what it wants to print.
    """
    global _installed, _pid
    if _installed:
        return
    _installed, _pid = True, os.getpid()
    previous = sys.excepthook

    def note_and_go_on(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        global _failed
        _failed = True
        previous(kind, error, trace)

    sys.excepthook = note_and_go_on
    atexit.register(_end_if_failed)


def failed() -> bool:
    """Say whether an exception that nobody caught is about to end the job. Local."""
    return _failed


def _end_all(code: int) -> NoReturn:
    if _alone():
        sys.exit(code)
    abort(code)


def _end_if_failed() -> None:
    if os.getpid() != _pid:
        return  # a fork has inherited this hook; MPI is its parent's
    if _failed and not _alone():
        abort(1)


def _others_leave_too() -> bool:
    """Ask whether all other ranks end with a code as well, for as long as the grace lasts."""
    world = current()
    if world is None or world.size == 1:
        return True
    return wait_until(world.comm.Ibarrier().Test, _GRACE)


def _alone() -> bool:
    mpi = _running_mpi()
    return mpi is None or mpi.COMM_WORLD.size == 1


def _running_mpi():  # type: ignore[no-untyped-def]  # returns the module mpi4py.MPI or None
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return None
    return mpi


def _exit_code(exit_: SystemExit) -> int:
    if exit_.code is None or isinstance(exit_.code, int):
        return exit_.code or 0
    _say(str(exit_.code))
    return 1


def _report(error: BaseException) -> None:
    if isinstance(error, LaunchError):
        # The fault lies in how the job was started; a stack of our own code would hide that.
        _say(f"{type(error).__name__}: {error}")
        return
    if isinstance(error, LockstepError):
        _say(_short(error))
        return
    _say("".join(traceback.format_exception(error)).rstrip())


def _short(error: LockstepError) -> str:
    """Show the job's own lines only: the message says what happened inside of torch and here."""
    shown = traceback.TracebackException.from_exception(error)
    frames = [frame for frame in shown.stack if is_the_users(frame.filename)]
    lines = traceback.StackSummary.from_list(frames).format()
    head = "Traceback (the job's own lines):\n" if lines else ""
    return f"{head}{''.join(lines)}{type(error).__name__}: {error}"


def _say(text: str) -> None:
    world: World | None = current()
    prefix = f"[rank {world.rank} of {world.size}, {world.host}] " if world else ""
    # One write, so that the lines of several ranks do not mix.
    sys.stderr.write(f"{prefix}{text}\n")
    flush()
