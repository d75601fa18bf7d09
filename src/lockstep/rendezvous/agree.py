"""Let all ranks know what each has found, so that a failure of one is the same error on all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from lockstep.ending import within
from lockstep.errors import CollectiveTimeout, LockstepError, RendezvousError
from lockstep.waiting import wait_until
from lockstep.world import World

T = TypeVar("T")

# Seconds within which ranks that have come this far reach the next exchange. What they do between
# two exchanges has shorter limits of its own.
STEP = 60.0


@dataclass(frozen=True)
class Trouble:
    """Why a rank cannot go on: what was found, what is needed, what to do."""

    found: str
    needed: str
    cure: str


def gather(world: World, mine: T, seconds: float = STEP) -> list[T]:
    """Return what each rank brings, in rank order, on all ranks. Collective, with a limit.

    Raises:
        CollectiveTimeout: some rank did not come within the seconds.
    """
    arrive(world, seconds)
    with within(seconds, "telling each other what was found"):
        found: list[T] = world.comm.allgather(mine)
    return found


def from_root(world: World, value: T, seconds: float = STEP) -> T:
    """Return the root's value on all ranks. Collective, with a limit."""
    arrive(world, seconds)
    with within(seconds, "hearing from the root"):
        found: T = world.comm.bcast(value, root=0)
    return found


def arrive(
    world: World, seconds: float = STEP, meanwhile: Callable[[], object] | None = None
) -> None:
    """Wait for all ranks, with a limit; do something between two looks. Collective."""
    arrival = world.comm.Ibarrier()

    def look() -> bool:
        if meanwhile is not None:
            meanwhile()
        return bool(arrival.Test())

    if not wait_until(look, seconds):
        raise CollectiveTimeout(
            f"rank {world.rank} of {world.size} waited {seconds:g} s for the others "
            "while opening torch.distributed",
            needed="every rank opens the session, with the same arguments",
            cure="look at what the other ranks print or do",
        )


def agree(
    world: World, trouble: Trouble | None, kind: type[LockstepError] = RendezvousError
) -> None:
    """Go on if no rank has trouble; otherwise raise the same error on all ranks. Collective.

    Raises:
        kind: names the ranks and hosts, and what each of them has found.
    """
    everyone = gather(world, (world.host, trouble))
    if error := combine(everyone, kind):
        raise error


def combine(
    everyone: Sequence[tuple[str, Trouble | None]], kind: type[LockstepError] = RendezvousError
) -> LockstepError | None:
    """Make one error of what all ranks have found, None if they have found nothing. Local.

    Args:
        everyone: each rank's host and trouble, in rank order.
    """
    who: dict[Trouble, list[str]] = {}
    for rank, (host, trouble) in enumerate(everyone):
        if trouble is not None:
            who.setdefault(trouble, []).append(f"{rank} ({host})")
    if not who:
        return None
    first = next(iter(who))
    if len(who) == 1 and len(who[first]) == len(everyone):
        found = f"all ranks: {first.found}" if len(everyone) > 1 else first.found
    else:
        found = "\n".join(f"rank {shorten(names)}: {it.found}" for it, names in who.items())
    return kind(found, needed=first.needed, cure=first.cure)


def shorten(names: Sequence[str], most: int = 6) -> str:
    """List names in one line, and say how many there are beyond the first few. Local."""
    text = ", ".join(names[:most])
    return text if len(names) <= most else f"{text} and {len(names) - most} more"


def limited(what: Callable[[], T], seconds: float) -> T:
    """Call something that may hang in the operating system, and wait for it with a limit. Local.

    Raises:
        TimeoutError: it did not return in time; its thread is left behind.
    """
    result: list[Any] = []

    def call() -> None:
        try:
            result.append((what(), None))
        except BaseException as error:
            result.append((None, error))

    thread = threading.Thread(target=call, name="lockstep-limited", daemon=True)
    thread.start()
    thread.join(seconds)
    if not result:
        raise TimeoutError(f"no answer within {seconds:g} s")
    value, error = result[0]
    if error is not None:
        raise error
    found: T = value
    return found
