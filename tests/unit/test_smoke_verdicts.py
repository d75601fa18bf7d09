"""What the checks of the smoke test make of their findings: links, cores, memory, launch, paths."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from laboratory import lab_of, texts

from lockstep import launcher
from lockstep.rendezvous.locks import Race
from lockstep.smoke import (
    cpus,
    files,
    gpus,
    launch,
    links,
    memory,
    page,
    pictures,
    speed,
)
from lockstep.smoke import network as net
from lockstep.smoke import shared_path as shared
from lockstep.smoke.check import Finding, Options
from lockstep.smoke.links import Link


@pytest.mark.parametrize("points", range(2, 12))
def test_every_pair_meets_once(points: int) -> None:
    """Disjoint pairs in each round, and all pairs in all rounds."""
    numbers = [10 * i for i in range(points)]
    rounds = links.schedule(numbers)
    for pairs in rounds:
        met = [point for pair in pairs for point in pair]
        assert len(met) == len(set(met))
    pairs = {frozenset(pair) for one in rounds for pair in one}
    assert len(pairs) == sum(len(one) for one in rounds) == points * (points - 1) // 2


def test_many_points_meet_some() -> None:
    """A thousand nodes are not measured a thousand times."""
    rounds = links.schedule(range(1000))
    assert len(rounds) == links.ROUNDS
    assert all(len(one) == 500 for one in rounds)


def _facts(*own: Link) -> net.Facts:
    return net.Facts(None, "", {}, own)


def test_odd_links() -> None:
    """Of three nodes the one whose links are all slow; of four a single link; two alone."""
    fast, slow = 1e9, 100e6
    three = [Link(0, 1, 3e-5, fast), Link(0, 2, 3e-5, slow), Link(1, 2, 3e-5, slow)]
    found = net.Network().judge({0: _facts(*three[:2]), 1: _facts(three[2])}, lab_of(1, 1, 1))
    assert texts(found).startswith("node2: all its links are slow, 100.0 MB/s; usual is 1000 MB/s")
    assert len(found.faults) == 1
    four = [Link(a, b, 3e-5, fast) for a in range(4) for b in range(a) if (a, b) != (3, 1)]
    found = net.Network().judge({0: _facts(*four, Link(3, 1, 3e-5, slow))}, lab_of(1, 1, 1, 1))
    assert [it.found.split(":")[0] for it in found.faults] == ["between node3 and node1"]
    two = net.Network().judge({0: _facts(Link(0, 1, 3e-5, 10e6))}, lab_of(1, 1))
    assert "between node0 and node1" in texts(two)
    assert net.Network().judge({0: _facts(*four)}, lab_of(1, 1, 1, 1)).verdict == "ok"
    late = [*four, Link(3, 1, 1e-3, fast)]
    assert "1000 µs" in texts(net.Network().judge({0: _facts(*late)}, lab_of(1, 1, 1, 1)))


def test_pairs_that_do_not_connect() -> None:
    """Named by host and address, with the reason."""
    it = net.Facts(None, "", {"10.0.0.2": "no answer in 4 s", "10.0.0.3": ""}, ())
    found = net.Network().judge({1: it}, lab_of(1, 1, 1))
    assert texts(found) == "node1 cannot connect to 10.0.0.2: no answer in 4 s"
    assert found.verdict == "failed"


def _core(*cores: int, seconds: float = 1.0, threads: int | None = 1) -> cpus.Facts:
    return cpus.Facts(cores, 4, None, threads, seconds, ())


def test_cores() -> None:
    """Unbound ranks share rightly; overlaps, too many ranks or threads are named."""
    judge, lab = cpus.Cpus().judge, lab_of(2)
    assert judge({0: _core(0, 1, 2, 3), 1: _core(0, 1, 2, 3)}, lab).verdict == "ok"
    assert judge({0: _core(0), 1: _core(1)}, lab).verdict == "ok"
    overlap = judge({0: _core(0, 1), 1: _core(1, 2)}, lab)
    assert "ranks 0, 1 (node0) share core 1" in texts(overlap)
    crowd = judge({0: _core(2), 1: _core(2)}, lab)
    assert texts(crowd) == "node0: 2 ranks on 1 core (2) of the 4 there"
    threads = judge({0: _core(0, 1, threads=4), 1: _core(0, 1, threads=4)}, lab)
    assert "8 threads of 2 ranks on 2 cores" in texts(threads)
    assert threads.faults[0].cure == "export OMP_NUM_THREADS=1"
    fair = judge({0: _core(0, 1, threads=None), 1: _core(0, 1, threads=None)}, lab)
    assert fair.verdict == "ok"


def test_a_slow_all_reduce_is_not_the_networks_fault_without_cores() -> None:
    """The network is blamed only where every rank has a core."""
    slow, fast = [0.1] * len(speed.SIZES), [0.01] * len(speed.SIZES)
    times = {0: speed.Facts({"mpi": slow, "gloo": fast}, fast)}
    judge = speed.Speed().judge
    for ranks, blamed in (
        ({0: _core(0, 1), 1: _core(0, 1), 2: _core(0), 3: _core(1)}, "slow network"),
        (dict.fromkeys(range(4), _core(0)), "node1: 2 ranks on 1 core"),
        (dict.fromkeys(range(4), replace(_core(0, 1), got=0.5)), "a rank had 50% of a core"),
    ):
        lab = lab_of(2, 2)
        cpus.Cpus().judge(ranks, lab)
        said = texts(judge(times, lab))
        assert blamed in said
        assert ("network" in said) == ("network" in blamed)


def test_slow_ranks_and_nodes() -> None:
    """A rank by its number, a whole node by its name."""
    judge = cpus.Cpus().judge
    every = {rank: _core(rank % 2) for rank in range(6)}
    one = judge(every | {3: _core(1, seconds=2.5)}, lab_of(2, 2, 2))
    assert "rank 3 (node1): 2.5 times as slow as the median" in texts(one)
    node = judge(every | {4: _core(0, seconds=2.0), 5: _core(1, seconds=2.0)}, lab_of(2, 2, 2))
    assert "all ranks of node2: 2.0 times as slow" in texts(node)


def test_quotas_of_control_groups(tmp_path: Path) -> None:
    """cpu.max and memory.max bind in containers and batch jobs."""
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert cpus.cpu_quota(tmp_path) == 1.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cpus.cpu_quota(tmp_path) is None
    assert cpus.cpu_quota(tmp_path / "nothing") is None
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:  4000 kB\n")
    assert memory.available(tmp_path, tmp_path) == 4000 * 1024
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.current").write_text("1000000\n")
    assert memory.available(tmp_path, tmp_path) == 2_000_000


def test_memory() -> None:
    """Each node has to hold its own ranks; the small one is named."""
    good = memory.Facts(64 * 2**30, 8 * 2**30, 4096, None, None, False)
    small = memory.Facts(64 * 2**30, 2**20, 4096, None, None, False)
    judge, lab = memory.Memory().judge, lab_of(2, 2)
    assert judge(dict.fromkeys(range(4), good), lab).verdict == "ok"
    found = judge({0: good, 1: good, 2: small, 3: small}, lab)
    assert found.verdict == "failed"
    assert texts(found) == "node1: 1 MiB free in /dev/shm for 2 ranks, 128 MiB needed"
    few = memory.Facts(64 * 2**30, 8 * 2**30, 100, None, None, False)
    found = judge({0: good, 1: few, 2: good, 3: good}, lab)
    assert "rank 1 (node0): 100 open files allowed, 1024 needed" in texts(found)


def test_gpus() -> None:
    """None at all is not applicable; a rank without one of its own is named."""
    judge, lab = gpus.Gpus().judge, lab_of(2)
    assert judge({0: gpus.Facts(), 1: gpus.Facts()}, lab).verdict == "not applicable"
    two = gpus.Facts(ids=("a", "b"), names=("H200", "H200"))
    assert judge({0: two, 1: two}, lab).verdict == "ok"
    same = gpus.Facts(ids=("a",), names=("H200",))
    assert "its GPU is that of rank 0" in texts(judge({0: same, 1: same}, lab))
    wrong = gpus.Facts(ids=("a", "b"), names=("H200", "H200"), sums=False)
    assert judge({0: two, 1: wrong}, lab).verdict == "failed"


def _launch(**other: Any) -> launch.Facts:
    facts: dict[str, Any] = {
        "library": "Open MPI v5.0.11",
        "standard": (3, 1),
        "threads": "multiple",
        "launch": launcher.Launch("openmpi", 4, 0, "a variable"),
        "on_node": 2,
        "local_size": 2,
        "cores": (0, 1),
    }
    return launch.Facts(**facts | other)


def _launched(**odd: Any) -> dict[int, launch.Facts]:
    """Return the facts of four ranks, of which the last is odd."""
    every = {
        rank: _launch(launch=launcher.Launch("openmpi", 4, rank, "a variable")) for rank in range(4)
    }
    return every | {3: _launch(**{"launch": every[3].launch} | odd)}


def test_launch(tmp_path: Path) -> None:
    """Other libraries, other ranks than announced, nodes without their ranks."""
    judge, lab = launch.Launch().judge, lab_of(2, 2)
    assert judge(_launched(), lab).verdict == "ok"
    assert "rank 3 (node1) runs MPICH 5" in texts(judge(_launched(library="MPICH 5"), lab))
    wrong = _launched(launch=launcher.Launch("openmpi", 4, 1, "a variable"))
    assert "announced rank 1 of 4 (a variable), MPI says 3 of 4" in texts(judge(wrong, lab))
    assert judge(_launched(threads="serialized"), lab).verdict == "warning"
    assert "only 1 share memory" in texts(judge(_launched(local_size=1), lab))
    uneven = judge(_launched(), lab_of(3, 1))
    assert "another number of ranks" in texts(uneven)
    lab.options = Options(Path("/shared"), per_node=1)
    assert judge(_launched(), lab).verdict == "failed"
    (tmp_path / "hosts").write_text("node0 slots=2\nnode1 slots=2\nnode2 slots=2\n")
    lab.options = Options(Path("/shared"), hostfile=tmp_path / "hosts")
    assert "names 3 hosts, but all 4 ranks are on node0, node1" in texts(judge(_launched(), lab))


def _path(**other: Any) -> shared.Facts:
    facts: dict[str, Any] = {
        "seen": (0.01, 0.02),
        "renames": files.Renames(100, 0, 0, 0),
        "locks": Race(50, 50),
        "space": 2**40,
        "kind": "nfs4",
        "speed": files.Speed(1e9, 1e9),
    }
    return shared.Facts(**facts | other)


def test_shared_path() -> None:
    """Delays, renames, locks, room and speed: the worst counts."""
    judge, lab = shared.SharedPath().judge, lab_of(1, 1)
    assert judge({0: _path(), 1: _path()}, lab).verdict == "ok"
    late = judge({0: _path(), 1: _path(seen=(8.0, 0.0))}, lab)
    assert "node1 sees a new file of node0 only after 8.0 s" in texts(late)
    assert judge({0: _path(), 1: _path(seen=(None, 0.0))}, lab).verdict == "failed"
    torn = judge({0: _path(), 1: _path(renames=files.Renames(100, 2, 1, 0))}, lab)
    assert "readers 2 times found no file and 1 times a mixed one" in texts(torn)
    locks = judge({0: _path(locks=Race(37, 50)), 1: _path(locks=Race(37, 50))}, lab)
    assert "37 of 50 records" in texts(locks)
    assert locks.verdict == "warning"
    assert locks.details["rendezvous"] == "tcp"
    full = {0: _path(space=2**20), 1: _path(space=2**20)}
    assert judge(full, lab).verdict == "failed"
    slow = judge({0: _path(), 1: _path(speed=files.Speed(1e6, 1e9))}, lab)
    assert "node1 writes 1.0 MB/s there" in texts(slow)


def test_kind_of_file_system() -> None:
    """Of a mount inside of another the inner one counts."""
    assert files.kind_of(Path("/proc/self")) == "proc"
    assert files.kind_of(Path("/dev/shm")) == "tmpfs"


def test_the_page_needs_nothing_else() -> None:
    """All texts are escaped, pictures are inside, JSON can hold the record."""
    finding = Finding("1 < 2 & <b>")
    finding.fail("<script>found</script>", "<script>cure</script>")
    finding.pictures = [
        pictures.Matrix("matrix", ["a", "b"], [[None, 1.0], [2.0, None]]),
        pictures.Matrix("nothing", ["a"], [[None]]),
        pictures.Bars("bars", ["a", "b"], [1.0, 2.0]),
        pictures.Lines("lines", "bytes", [1, 8, 64], {"mpi": [1.0, 2.0, 3.0], "gloo": [2.0]}),
    ]
    row = {
        "name": "fake",
        "question": "Is it?",
        "verdict": finding.verdict,
        "summary": finding.summary,
        "faults": [vars(fault) for fault in finding.faults],
        "seconds": 0.1,
        "details": {"a": "<i>"},
    }
    record = {
        "ranks": 1,
        "nodes": 1,
        "started": "now",
        "seconds": 1.0,
        "verdict": "failed",
        "command": ["smoke.py"],
        "checks": [row],
    }
    json.dumps(record)
    text = page.page(record, [finding])
    assert text.count("<svg ") == 4
    for svg in re.findall("<svg .*?</svg>", text):
        ElementTree.fromstring(svg)
    assert "<script" not in text
    assert "<i>" not in text
    assert "&lt;script&gt;cure" in text
