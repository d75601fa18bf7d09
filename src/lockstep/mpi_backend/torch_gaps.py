"""Close the gaps that torch 2.14 leaves around a Python backend named "mpi".

1. The Work of a Python backend comes back to the caller inside a C++ object that passes on only
   ``wait`` and ``get_future``. Asked whether it is completed it says no for ever, and asked for
   the source of a message it raises. The methods below ask the Work inside.
2. For the bare name "mpi" torch passes rank and size -1 and an empty store, since its own MPI
   backend knew better. TORCH_DISTRIBUTED_DEBUG=DETAIL and groups of other backends beside it need
   the real ones. They get them, and a store that is opened when it is first needed.

All functions are Local unless they say otherwise.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import torch._C._distributed_c10d as bindings
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

_EXPECTED = ["group_size", "group_rank", "global_ranks_in_group", "backend", "store"]
# The wrapper is a plain Work; works of torch's own backends know what they are.
_UNKNOWN = int(cast("Any", bindings).OpType.UNKNOWN)
_store: dist.Store | None = None


def close() -> None:
    """Install the mends, once. Local."""
    if getattr(c10d, "_lockstep_gaps_closed", False):
        return
    c10d._lockstep_gaps_closed = True  # type: ignore[attr-defined]
    _mend_work()
    helper = c10d._new_process_group_helper
    # Another torch may have another helper; then the bare name lacks a store, and nothing else.
    if list(inspect.signature(helper).parameters)[:5] == _EXPECTED:
        c10d._new_process_group_helper = _with_real_world(helper)


def _inner(work: Any) -> Any:
    """Return our Work inside torch's wrapper, None if there is none of ours."""
    from lockstep.mpi_backend.work import asked

    asked.work = None
    try:
        # The only question that reaches the Work inside without waiting for it.
        dist.Work.get_future(work)
    except Exception:
        return None
    finally:
        found, asked.work = asked.work, None
    return found


def _mend_work() -> None:
    for name, question in (
        ("is_completed", "is_completed"),
        ("source_rank", "source_rank"),
        ("_source_rank", "source_rank"),
        ("exception", "failure"),
        ("is_success", "succeeded"),
    ):
        original = getattr(dist.Work, name)
        setattr(dist.Work, name, _asking_inside(original, question))


def _asking_inside(original: Callable[..., Any], question: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def ask(self: Any) -> Any:
        if type(self) is dist.Work and cast("Any", self)._get_op_type() == _UNKNOWN:
            inner = _inner(self)
            if inner is not None and question == "succeeded":
                return inner.is_completed() and inner.failure() is None
            if inner is not None and hasattr(inner, question):
                return getattr(inner, question)()
        return original(self)

    return ask


def _with_real_world(helper: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(helper)
    def create(
        group_size: int,
        group_rank: int | None,
        ranks: list[int],
        backend: str,
        store: dist.Store,
        *rest: Any,
        **named: Any,
    ) -> Any:
        if _is_ours():
            if group_size == -1 and group_rank == -1 and not ranks and backend == "mpi":
                from lockstep.world import discover

                world = discover()
                group_size, group_rank = world.size, world.rank
                _forget_store()
                if dist.get_debug_level() == dist.DebugLevel.DETAIL:
                    store = _real_store(named.get("timeout"))
            elif ranks and backend != "mpi" and _bare_default():
                store = _real_store(named.get("timeout"))
        return helper(group_size, group_rank, ranks, backend, store, *rest, **named)

    return create


def _is_ours() -> bool:
    from lockstep.mpi_backend.register import create_backend

    plugin: Any = dist.Backend._plugins.get("MPI")
    return plugin is not None and plugin.creator_fn is create_backend


def _bare_default() -> bool:
    """Say whether the default group was opened by the bare name, and so has no store."""
    pg = dist.group.WORLD
    return pg is not None and c10d._world.pg_map[pg][0] == "mpi"


def _forget_store() -> None:
    global _store
    _store = None


def _real_store(timeout: timedelta | None) -> dist.Store:
    """Open a store on the root and connect to it, once a default group. Collective."""
    global _store
    if _store is None:
        from lockstep.rendezvous import open_store
        from lockstep.world import discover

        _store = open_store(discover(), timeout or c10d.default_pg_timeout)
    return _store
