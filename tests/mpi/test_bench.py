"""The benchmarks: every way takes part at every size, sums are checked, the table is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lockstep
from lockstep import World, tuning
from lockstep.allreduce import NAMES
from lockstep.bench import collective, point_to_point
from lockstep.bench.bandwidth import bus_bandwidth
from lockstep.bench.contenders import Contender, Prepared, contenders, open_groups
from lockstep.bench.measure import compare
from lockstep.choice import choose
from lockstep.errors import LockstepError, SettingsError

pytestmark = pytest.mark.limit(120)


@pytest.fixture
def groups(world: World, default_group: None) -> dict[str, Any]:
    """Return the groups of all backends that can work here."""
    return open_groups(world)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_way_at_every_size(world: World, groups: dict[str, Any], dtype: torch.dtype) -> None:
    """With times in order, at least three calls, and bandwidths that fit them."""
    those = contenders(world, groups, dtype)
    lengths = [4, 1000, 4096]
    rows, left_out = collective.measure(world, those, lengths, dtype, seconds=1.0)
    if not any(what.startswith("from ") for what in left_out):
        assert not left_out
        assert [row.nbytes for row in rows] == [n for n in lengths for _ in those]
    assert {row.nbytes for row in rows} <= set(lengths)
    first = [row.name for row in rows if row.nbytes == 4]
    assert first == [one.name for one in those]
    assert {"mpi: all_reduce", "mpi: auto", "mpi: ring", "gloo: all_reduce", "memcpy"} <= {*first}
    assert ("MPI_Allreduce" in first) == (dtype is torch.float32)
    for row in rows:
        assert 0 < row.low <= row.median <= row.high
        assert row.n >= 3
        assert row.algbw == row.nbytes / row.median
        if row.what == "all_reduce":
            assert row.busbw == bus_bandwidth(row.nbytes, row.median, world.size)
        else:
            assert (row.name, row.busbw) == ("memcpy", None)
    assert all(other == rows for other in world.comm.allgather(rows))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("only", ["mpi: ring, memcpy", "gloo"])
def test_only_some(world: World, groups: dict[str, Any], only: str) -> None:
    """By parts of their names; the limit is always among them."""
    names = [one.name for one in contenders(world, groups, torch.float32, only)]
    assert names[0] == "memcpy"
    assert len(names) > 1
    assert all(name.startswith(("mpi: ring", "gloo: ")) for name in names[1:])


@pytest.mark.ranks(2)
def test_a_wrong_sum_is_found_on_all_ranks(world: World) -> None:
    """One that forgets an element, on the last rank alone."""

    def prepare(tensor: torch.Tensor) -> Prepared:
        def call() -> None:
            kept = tensor[-1].clone()
            dist.all_reduce(tensor)
            if world.rank == world.size - 1:
                tensor[-1] = kept

        return Prepared(tensor, call)

    wrong = Contender("forgetful", "mpi", "none", prepare)
    with pytest.raises(LockstepError, match="forgetful made a wrong sum of 400 bytes"):
        collective.measure(world, [wrong], [400], torch.float32, seconds=0.1)


@pytest.mark.ranks(2)
def test_who_refuses_is_left_out(world: World, groups: dict[str, Any]) -> None:
    """With the reason, and the others are measured."""

    def prepare(tensor: torch.Tensor) -> Prepared:
        raise ValueError("not on this machine\n  needed: another")

    refusing = Contender("refusing", "mpi", "none", prepare)
    those = [refusing, *contenders(world, groups, torch.float32, "mpi: ring")]
    rows, left_out = collective.measure(world, those, [64, 128], torch.float32, seconds=0.2)
    assert left_out["refusing"] == "not on this machine"
    assert {row.name for row in rows} == {"memcpy", "mpi: ring"}


@pytest.mark.ranks(2)
def test_no_time_left(world: World, groups: dict[str, Any]) -> None:
    """The first size is measured, the others are left out by name."""
    those = contenders(world, groups, torch.float32, "mpi: ring")
    rows, left_out = collective.measure(world, those, [64, 128, 256], torch.float32, seconds=1e-9)
    assert {row.nbytes for row in rows} == {64}
    assert list(left_out) == ["from 128 bytes"]


def test_the_slowest_rank_counts(world: World) -> None:
    """All ranks get the time of the one that works longest in a call."""
    sample = compare(world, {"work": lambda: _work(world)}, calls=3, rounds=2)["work"]
    assert sample.n == 6
    assert all(other == sample for other in world.comm.allgather(sample))


def _work(world: World) -> None:
    for _ in range(1 + 50 * world.rank):
        torch.ones(1000).sum()


@pytest.mark.ranks(2)
def test_messages(world: World, groups: dict[str, Any]) -> None:
    """Both kinds, every backend and plain MPI; a message that was changed is found."""
    lengths = [1, 300, 70_000]
    rows, left_out = point_to_point.measure(world, groups, lengths, seconds=1.0)
    wheres = point_to_point.partners(world)
    ways = ["MPI_Send", *groups]
    if not left_out:
        assert len(rows) == len(lengths) * len(wheres) * 2 * len(ways)
    kinds = {f"{kind} {where}" for kind in ("ping-pong", "window") for where in wheres}
    assert {row.what for row in rows} == kinds
    assert {row.name for row in rows} == set(ways)
    assert all(row.algbw == row.nbytes / row.median for row in rows)


def table_on_root(world: World, path: Path, content: str) -> pytest.MonkeyPatch:
    """Let the root, and it alone, have a table."""
    patch = pytest.MonkeyPatch()
    patch.setenv("LOCKSTEP_TUNING", "0")
    if world.rank == 0:
        path.write_text(content)
        patch.setenv("LOCKSTEP_TUNING", str(path))
    return patch


def entry(world: World, ranks: int | None = None) -> str:
    """Return a table for so many ranks, by default for this world."""
    size = world.size if ranks is None else ranks
    key = {"ranks": size, "nodes": world.nodes, "dtype": "float32", "backend": "mpi"}
    steps = [[1000, "recursive_doubling"], [None, "gather_broadcast"]]
    row = str({**key, "up_to_bytes": steps}).replace("'", '"').replace("None", "null")
    return f'{{"lockstep all-reduce table": 1, "entries": [{row}]}}'


def test_a_session_uses_the_table_of_the_root(world: World, no_group: None, tmp_path: Path) -> None:
    """All ranks choose by it, and forget it at the end."""
    patch = table_on_root(world, tmp_path / "table.json", entry(world))
    try:
        with lockstep.session(backend="mpi", timeout=60, quiet=True):
            small, large = (choose(n, world.size, world.nodes, torch.float32) for n in (1000, 1001))
            assert (small, large) == ("recursive_doubling", "gather_broadcast")
            assert choose(4, world.size, world.nodes, torch.float64) != "recursive_doubling"
            assert choose(4, world.size, world.nodes, torch.float32, tuned=False) in NAMES
            summed = torch.ones(5)
            lockstep.allreduce.allreduce(summed, "auto")
            assert summed.tolist() == [float(world.size)] * 5
        assert tuning.choose(4, world.size, world.nodes, torch.float32) is None
    finally:
        patch.undo()


def test_a_table_of_other_ranks_is_not_used(world: World, no_group: None, tmp_path: Path) -> None:
    """The built-in choice holds."""
    patch = table_on_root(world, tmp_path / "table.json", entry(world, world.size + 1))
    try:
        with lockstep.session(backend="mpi", timeout=60, quiet=True):
            assert tuning.choose(4, world.size, world.nodes, torch.float32) is None
    finally:
        patch.undo()


@pytest.mark.parametrize("content", ["", '{"epochs": 3}', entry.__doc__ or ""])
def test_a_bad_table_is_the_same_error_on_all_ranks(
    world: World, no_group: None, tmp_path: Path, content: str
) -> None:
    """Though only the root has read it; and the next session opens."""
    patch = table_on_root(world, tmp_path / "table.json", content)
    try:
        with (
            pytest.raises(SettingsError, match=r"table\.json cannot be used") as caught,
            lockstep.session(backend="mpi", timeout=60, quiet=True),
        ):
            pass
        assert len(set(world.comm.allgather(str(caught.value)))) == 1
        patch.setenv("LOCKSTEP_TUNING", "0")
        with lockstep.session(backend="mpi", timeout=60, quiet=True):
            assert tuning.choose(4, world.size, world.nodes, torch.float32) is None
    finally:
        patch.undo()
