"""Calls over gloo are noted by hooks of torch's: all of them, and when each is over."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lockstep
from lockstep import World, notes
from lockstep.watchdog.reading import Call, read

LIMIT = timedelta(seconds=30)
Verb = Callable[[World], object]

pytestmark = pytest.mark.usefixtures("no_group")


def many(world: World) -> list[torch.Tensor]:
    return [torch.ones(5) for _ in range(world.size)]


def on_root(world: World) -> list[torch.Tensor] | None:
    return many(world) if world.rank == 0 else None


VERBS: dict[str, Verb] = {
    "all_reduce": lambda w: dist.all_reduce(torch.ones(5)),
    "all_reduce (async)": lambda w: dist.all_reduce(torch.ones(5), async_op=True),
    "all_reduce (coalesced)": lambda w: dist.all_reduce_coalesced([torch.ones(5), torch.ones(3)]),
    "all_reduce (sparse)": lambda w: dist.all_reduce(torch.ones(5).to_sparse()),
    "broadcast": lambda w: dist.broadcast(torch.ones(5), 0),
    "reduce": lambda w: dist.reduce(torch.ones(5), 0),
    "all_gather": lambda w: dist.all_gather(many(w), torch.ones(5)),
    "all_gather (one)": lambda w: dist.all_gather_single(torch.empty(5 * w.size), torch.ones(5)),
    "gather": lambda w: dist.gather(torch.ones(5), on_root(w)),
    "scatter": lambda w: dist.scatter(torch.ones(5), on_root(w)),
    "reduce_scatter": lambda w: dist.reduce_scatter(torch.empty(5), many(w)),
    "reduce_scatter (one)": lambda w: dist.reduce_scatter_single(
        torch.empty(5), torch.ones(5 * w.size)
    ),
    "all_to_all": lambda w: dist.all_to_all(many(w), many(w)),
    "all_to_all (one)": lambda w: dist.all_to_all_single(torch.empty(w.size), torch.ones(w.size)),
    "barrier": lambda w: dist.barrier(),
}


def last(seconds: float = 20.0) -> Call:
    """Return the last call on the default group, once it is over as far as the notes say."""
    assert notes.current is not None
    end = time.monotonic() + seconds
    while True:
        call = _on_default(notes.current._memory)[-1]
        if call.left or time.monotonic() > end:
            return call
        time.sleep(0.01)


def test_calls_are_noted_and_are_over(world: World) -> None:
    """With verb and line, by the same numbers on all ranks.

    That torch's handles say by themselves when they are over is what the notes rely on.
    """
    with lockstep.session(backend="gloo", timeout=LIMIT, quiet=True):
        if world.size == 1:
            assert notes.current is None
            return
        for verb in VERBS.values():
            verb(world)
        assert last().left
        assert notes.current is not None
        calls = _on_default(notes.current._memory)
        names = [name.partition(" ")[0] for name in VERBS]
        assert [(it.number, it.verb) for it in calls] == list(enumerate(names, start=1))
        assert [it.verb for it in calls if not it.left] == []
        assert {it.group for it in calls} == {f"0|0-{world.size - 1}"}
        assert {it.file for it in calls} == {"test_hooks.py"}


def test_what_ddp_calls_is_noted(world: World) -> None:
    """Its all_reduce of the gradients is called by C++, from the line of backward."""
    with lockstep.session(backend="gloo", timeout=LIMIT, quiet=True):
        if world.size == 1:
            return
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        model(torch.ones(2, 4)).sum().backward()
        call = last()
        assert (call.verb, call.what, call.file) == ("all_reduce", "float32[20]", "test_hooks.py")


def test_a_call_that_waits_lasts(world: World) -> None:
    """Until the last rank has come; seen again and again, so that who is stuck does not wait."""
    with lockstep.session(backend="gloo", timeout=LIMIT, quiet=True):
        if world.size == 1:
            return
        if world.rank == 0:
            dist.barrier()
            work = dist.all_reduce(torch.ones(5), async_op=True)
            first = last(0.0)
            assert not first.left
            assert first.seen
            end = time.monotonic() + 20.0
            while (now := last(0.0)).seen <= first.entered + 10**9 and time.monotonic() < end:
                time.sleep(0.05)
            assert now.age(0) >= 1.0
            world.comm.Barrier()
            work.wait()
        else:
            dist.barrier()
            world.comm.Barrier()
            dist.all_reduce(torch.ones(5))
        assert last().left


def test_a_call_that_fails_at_once_is_over(world: World) -> None:
    """torch raises before there is a handle; the program goes on, in a thread too."""
    with lockstep.session(backend="gloo", timeout=LIMIT, quiet=True):
        if world.size == 1:
            return
        assert notes.current is not None
        memory = notes.current._memory

        def fail() -> None:
            with pytest.raises(RuntimeError, match="unsupported reduction operation"):
                dist.all_reduce(torch.ones(5).to_sparse(), dist.ReduceOp.MAX)

        for call in (fail, Thread(target=fail).run):
            call()
            # nobody has entered it
            assert _on_default(memory) == []
        dist.barrier()
        assert (last().verb, last().number) == ("barrier", 3)


def test_a_group_that_the_program_destroys_is_gone(world: World) -> None:
    """With its threads; its hooks do not keep it."""
    with lockstep.session(backend="gloo", timeout=LIMIT, quiet=True):
        dist.barrier()
        before = len(os.listdir("/proc/self/task"))
        world.comm.Barrier()
        dist.destroy_process_group()
        end = time.monotonic() + 10.0
        while len(os.listdir("/proc/self/task")) >= before and time.monotonic() < end:
            time.sleep(0.01)
        assert len(os.listdir("/proc/self/task")) < before


def test_a_child_notes_nothing_in_its_parents_place(world: World) -> None:
    """The hooks are in the child of a fork too."""
    with lockstep.session(backend="gloo", timeout=LIMIT, quiet=True):
        if world.size == 1:
            return
        dist.barrier()
        before = last()
        if (pid := os.fork()) == 0:
            os._exit(0 if notes.current is None else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert last() == before


@pytest.mark.ranks(2)
def test_what_has_failed_is_not_waited_in(world: World) -> None:
    """A rank has left the group: the call of the others is over, and said to be what they do."""
    with lockstep.session(backend="gloo", timeout=LIMIT, quiet=True):
        dist.barrier()
        world.comm.Barrier()
        if world.rank == 0:
            dist.destroy_process_group()
        else:
            with pytest.raises(RuntimeError):
                dist.all_reduce(torch.ones(5))
            assert notes.current is not None
            memory = notes.current._memory
            end = time.monotonic() + 20.0
            while not (found := _on_default(memory)[-1]).failed and time.monotonic() < end:
                time.sleep(0.01)
            assert (found.verb, found.failed, found.left) == ("all_reduce", True, 0)
            assert found not in read(memory).timed(steps=True)
        world.comm.Barrier()


def _on_default(memory: Any) -> list[Call]:
    return [it for it in read(memory).calls if it.group.startswith("0|")]
