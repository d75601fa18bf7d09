"""Open and close torch.distributed on the world that MPI knows."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from lockstep import tuning
from lockstep.allreduce import NAMES
from lockstep.devices import device
from lockstep.ending import LONGEST
from lockstep.errors import CollectiveTimeout, LaunchError, SettingsError, counted
from lockstep.launch import die_together
from lockstep.rendezvous import Place, choose_interface, meet, parse
from lockstep.rendezvous.agree import STEP, Trouble, combine, gather, limited
from lockstep.rendezvous.env import variables
from lockstep.threads import set_threads
from lockstep.watchdog.watch import mode, unusual, watched
from lockstep.world import World, discover

# Tags on the world's communicator that nobody else uses, counted from the one for groups that
# split: of arrivals and of answers, at the begin and at the end.
_BEGIN, _END = (2, 3), (4, 5)
# After an exception, what is left of torch.distributed gets so many seconds to close.
_CLOSE = 2.0
# What the verbs get when the watchdog is to speak at the limit and then go on waiting.
_FOR_EVER = timedelta(days=365)
# Groups and stores of sessions that were left by an exception.
_left: list[object] = []


@dataclass(frozen=True)
class Plan:
    """What was asked for; it has to be the same on all ranks, but for the timeout.

    Attributes:
        backend: as the caller wrote it.
        rendezvous: likewise, "" if nothing was asked for.
        world_size: the number of ranks expected, None if any will do.
        timeout: None for what torch takes.
        environment: what the environment asks for.
    """

    backend: str
    rendezvous: str
    world_size: int | None
    timeout: timedelta | None = field(compare=False)
    environment: str = field(default_factory=unusual)

    @property
    def backends(self) -> list[str]:
        """The names in the backend's text, such as gloo and nccl."""
        return [part.rpartition(":")[2].strip() for part in self.backend.lower().split(",")]

    @property
    def needs_place(self) -> bool:
        """Whether the ranks have to meet anywhere but in MPI."""
        return self.backend.lower() != "mpi"

    @property
    def verbs(self) -> timedelta | None:
        """What torch is told as the timeout of verbs."""
        return _FOR_EVER if mode() == "wait" else self.timeout

    @property
    def limit(self) -> timedelta:
        """How long to wait for a rank that is late."""
        return self.timeout or c10d.default_pg_timeout


@contextmanager
def session(
    *,
    backend: str = "mpi",
    rendezvous: str | None = None,
    timeout: timedelta | float | None = None,
    world_size: int | None = None,
    threads: int | None = None,
    quiet: bool = False,
) -> Iterator[World]:
    """Open torch.distributed for all ranks of the launch, close it at the end. Collective.

    Rank and world size come from MPI. After an exception nobody is waited for.

    Args:
        backend: "mpi", "gloo", "nccl", or a list such as "cpu:gloo,cuda:nccl".
        rendezvous: where the ranks meet: "tcp" (the default), "tcp://HOST:PORT", "env",
            "file:///shared/directory"; `lockstep.rendezvous` tells them apart. "mpi" needs none.
        timeout: limit of a verb, and of the wait for a late rank here, in seconds if a number.
        world_size: the number of ranks expected, if any is.
        threads: of this rank; by default its share of the cores, or OMP_NUM_THREADS.
        quiet: the root does not say what was opened.

    Yields: the World of this process.

    Raises:
        LaunchError (RendezvousError, DeviceError), SettingsError: what is broken; on all ranks.
        CollectiveTimeout: some rank did not come to begin or end; it is named.
    """
    world, plan = discover(), Plan(backend, rendezvous or "", world_size, as_timedelta(timeout))
    with ExitStack() as stack:
        store = _open(world, plan, stack, threads, quiet)
        try:
            with watched(world, plan.limit.total_seconds()):
                yield world
        except BaseException:
            _drop(store)
            raise
        store = None  # before the others are told, see meet
        _close(world, plan)


def as_timedelta(limit: timedelta | float | None) -> timedelta | None:
    """Return a limit that is given as a timedelta or in seconds; None stays None. Local.

    Raises:
        SettingsError: it is neither, or not above 0.
    """
    if isinstance(limit, int | float) and 0 < limit <= LONGEST:
        return timedelta(seconds=limit)
    if limit is None or (isinstance(limit, timedelta) and limit > timedelta(0)):
        return limit
    raise SettingsError(
        f"timeout={limit!r}",
        needed="a timedelta or a number of seconds, above 0",
        cure="timeout=600, or timeout=timedelta(minutes=10)",
    )


def _open(
    world: World, plan: Plan, stack: ExitStack, threads: int | None, quiet: bool
) -> dist.Store | None:
    """Open torch.distributed; what is to be undone at the end goes on the stack. Collective."""
    _wait_for_all(world, _BEGIN, plan.limit, "open")
    _agree(world, plan)
    tuned = tuning.load(world, NAMES)
    stack.callback(tuning.forget)
    die_together()
    _left.clear()
    count = set_threads(world, threads)
    chosen = device(world, "cuda") if "nccl" in plan.backends else "cpu"
    store, where = None, "none needed"
    if plan.needs_place:
        if "gloo" in plan.backends:
            stack.enter_context(variables(choose_interface(world)))
        place = parse(plan.rendezvous or "tcp")
        assert isinstance(place, Place)
        store, where = stack.enter_context(meet(world, place, plan.limit))
        _open_at(world, plan, store)
    else:
        dist.init_process_group("mpi", timeout=plan.verbs)
    if world.rank == 0 and not quiet:
        sys.stderr.write(
            f"lockstep: backend {plan.backend}, rendezvous {where}, "
            f"{counted(world.size, 'rank')} on {counted(world.nodes, 'node')}, "
            f"{counted(count, 'thread')} a rank, {chosen}{tuned and f'; {tuned}'}\n"
        )
        sys.stderr.flush()
    return store


def _open_at(world: World, plan: Plan, store: dist.Store) -> None:
    """Open the default group with a store, on all ranks or on none. Collective.

    A rank leaves only when all have come, since to leave may mean to take the store away.
    """
    trouble = None
    try:
        dist.init_process_group(
            plan.backend,
            store=store,
            rank=world.rank,
            world_size=world.size,
            timeout=plan.verbs,
        )
    except Exception as error:
        trouble = Trouble(
            f"torch cannot open {plan.backend}: {type(error).__name__}: {error}",
            needed="a network and a store that all ranks reach",
            cure='`rendezvous="tcp"`, or `backend="mpi"`, which needs neither',
        )
    seconds = plan.limit.total_seconds() + STEP
    everyone = gather(world, (world.host, trouble), seconds)
    if failure := combine(everyone):
        _drop(store)
        raise failure


def _close(world: World, plan: Plan) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    if plan.needs_place:
        # the store goes with the root, and the root must not go before the others are done
        _wait_for_all(world, _END, plan.limit, "close")


def _trouble(world: World, plan: Plan) -> Trouble | None:
    """Say why this rank cannot do what was asked for. Local."""
    place = parse(plan.rendezvous or "tcp")
    if isinstance(place, Trouble):
        return place
    known = [it for it in dist.Backend.backend_list if _is_there(it)]
    for name in plan.backends:
        if name not in known:
            return Trouble(
                f"backend {plan.backend!r}: this torch has no {name or 'backend without a name'}",
                needed=f"one of {', '.join(known)}, or devices and backends, such as "
                '"cpu:gloo,cuda:nccl"',
                cure="correct the name; nccl comes with a torch for CUDA",
            )
    if plan.world_size not in (None, world.size):
        return Trouble(
            f"a world of {plan.world_size} ranks was asked for, but MPI has {world.size}",
            needed="the same number, or none asked for",
            cure=f"`mpirun -np {plan.world_size}` (srun -n), or leave the number out",
        )
    if dist.is_initialized():
        return Trouble(
            "torch.distributed is open already",
            needed="one session at a time",
            cure="leave the first session, or call torch.distributed.destroy_process_group()",
        )
    return None


def _agree(world: World, mine: Plan) -> None:
    """Go on if all ranks can do the same, otherwise raise on all of them. Collective."""
    everyone = gather(world, (world.host, mine, _trouble(world, mine)))
    if error := combine([(host, trouble) for host, _, trouble in everyone], LaunchError):
        raise error
    first = everyone[0][1]
    for rank, (host, plan, _) in enumerate(everyone):
        if plan != first:
            raise LaunchError(
                f"the ranks ask for different sessions: rank 0 for {_spell(first)}, "
                f"rank {rank} ({host}) for {_spell(plan)}",
                needed="the same arguments and environment on all ranks",
                cure="give every rank the same command line; `mpirun -x NAME` (Open MPI) or "
                "`-genv NAME VALUE` takes a variable to other hosts",
            )


def _spell(plan: Plan) -> str:
    return f"backend={plan.backend!r}, rendezvous={plan.rendezvous!r}{plan.environment}"


def _is_there(name: str) -> bool:
    # torch says of "mpi" whether its own was built in
    return name == "mpi" or (name not in ("undefined", "fake") and dist.is_backend_available(name))


def _wait_for_all(world: World, tags: tuple[int, int], limit: timedelta, verb: str) -> None:
    from lockstep.mpi_backend.monitored import arrive
    from lockstep.mpi_backend.tags import SPLIT

    seconds = limit.total_seconds()
    own = SPLIT + tags[0], SPLIT + tags[1]
    missing = arrive(world.comm, range(world.size), own, seconds)
    if missing is None or missing:
        who = ", ".join(map(str, missing or [0]))
        raise CollectiveTimeout(
            f"rank {world.rank} of {world.size} waited {seconds:g} s for rank {who} to {verb} "
            "the session",
            needed=f"every rank comes to {verb} the session",
            cure=f"look at what rank {who} prints or does; timeout= waits longer",
        )


def _drop(store: dist.Store | None) -> None:
    """Close torch.distributed without waiting for another rank. Local, with a limit.

    gloo's connections and the store's server are kept: to cut them would make the other ranks fail
    at once, and one of them might end the job before this rank has shown its traceback.
    """
    _left.append(store)
    if dist.is_initialized():
        # what cannot be closed in time is left to the end of the process
        with contextlib.suppress(Exception):
            limited(_abort, _CLOSE)


def _abort() -> None:
    for group in list(c10d._world.pg_map):
        _left.append(group)
        for kind in group._device_types:
            backend = group._get_backend(kind)
            if backend.name() != "gloo":
                backend.abort()
    dist.destroy_process_group()
