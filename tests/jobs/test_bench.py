"""The benchmark and `lockstep tune` as programs, under mpirun."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from launching import ROOT, Program, need

JOB = str(ROOT / "jobs" / "bench_allreduce.py")
LIMIT = 200.0


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (["--help"], 0, "--mode"),
        (["--seconds", "0"], 2, "above 0"),
        (["--smallest", "9", "--largest", "8"], 2, "up to --largest"),
    ],
)
def test_help_and_wrong_flags_never_start_mpi(
    flags: list[str], code: int, said: str, tmp_path: Path
) -> None:
    """They work where no MPI can be loaded at all."""
    mpi = need("openmpi")
    env = mpi.environment(MPI4PY_LIBMPI="/nonexistent/libmpi.so")
    outcome = Program([mpi.python, JOB, *flags], env, tmp_path).finish(LIMIT)
    assert outcome.code == code, str(outcome)
    assert said in outcome.text
    assert "LaunchError" not in outcome.text


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_reduces(ranks: int, tmp_path: Path) -> None:
    """Every way at every size, in JSON, CSV, picture and table; the run is DONE."""
    flags = ["--seconds", "20", "--largest", "4096", "--factor", "32", "--run", "out"]
    outcome = need("openmpi").run(ranks, JOB, *flags, directory=tmp_path, limit=LIMIT)
    assert outcome.code == 0, str(outcome)
    record = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert record["left_out"] == {}, str(outcome)
    assert record["surroundings"]["ranks"] == ranks
    rows: list[dict[str, Any]] = record["rows"]
    lengths = [4, 128, 4096]
    names = [row["name"] for row in rows if row["nbytes"] == 4]
    assert [(row["nbytes"], row["name"]) for row in rows] == [
        (nbytes, name) for nbytes in lengths for name in names
    ]
    wanted = {"memcpy", "MPI_Allreduce", "mpi: all_reduce", "mpi: auto", "gloo: all_reduce"}
    wanted |= {f"{b}: {a}" for b in ("mpi", "gloo") for a in ("ring", "rabenseifner")}
    assert wanted <= set(names)
    with (tmp_path / "out" / "bench.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [float(line["median"]) for line in lines] == [row["median"] for row in rows]
    assert (tmp_path / "out" / "bench.png").stat().st_size > 10_000
    assert (tmp_path / "out" / "DONE").exists()
    assert outcome.text.count("gloo: all_reduce") == 3, str(outcome)


@pytest.mark.parametrize("mode", ["allreduce", "p2p"])
def test_told_to_stop_it_writes_what_it_has(mode: str, tmp_path: Path) -> None:
    """By the file that the batch script makes before the time limit; the run is DONE."""
    flags = ["--mode", mode, "--seconds", "3000", "--smallest", "4096", "--run", "out"]
    mpi = need("openmpi")
    program = Program(mpi.command(2, JOB, *flags), mpi.environment(), tmp_path)
    program.wait_for("bench: 4096 bytes", 1, LIMIT)
    (tmp_path / "out" / "STOP").touch()
    outcome = program.finish(LIMIT)
    assert outcome.code == 0, str(outcome)
    record = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert {row["nbytes"] for row in record["rows"]} == {4096}
    assert list(record["left_out"].values()) == ["told to stop"]
    assert (tmp_path / "out" / "DONE").exists()


def test_messages(tmp_path: Path) -> None:
    """Between rank 0 and a partner, while a third one waits."""
    flags = ["--mode", "p2p", "--seconds", "20", "--largest", "1024", "--factor", "256"]
    outcome = need("openmpi").run(3, JOB, *flags, "--run", "out", directory=tmp_path, limit=LIMIT)
    assert outcome.code == 0, str(outcome)
    record = json.loads((tmp_path / "out" / "bench.json").read_text())
    kinds = {(row["what"], row["name"], row["nbytes"]) for row in record["rows"]}
    assert kinds == {
        (f"{what} on the node", name, nbytes)
        for what in ("ping-pong", "window")
        for name in ("MPI_Send", "mpi", "gloo")
        for nbytes in (4, 1024)
    }


def test_wrong_places_and_names_are_errors_before_anything_is_measured(tmp_path: Path) -> None:
    """A table that cannot be written; a name that nothing has."""
    mpi = need("openmpi")
    (tmp_path / "file").touch()
    tune = ("-m", "lockstep", "tune", "--seconds", "1000", "--out", "file/table.json")
    outcome = mpi.run(2, *tune, directory=tmp_path, limit=LIMIT)
    assert outcome.code not in (0, None), str(outcome)
    assert "StorageError: rank 0" in outcome.text, str(outcome)
    assert "cannot write the table of all-reduces file/table.json" in outcome.text, str(outcome)
    bench = (JOB, "--seconds", "1000", "--only", "ring,nonsense", "--run", "out")
    outcome = mpi.run(2, *bench, directory=tmp_path, limit=LIMIT)
    assert outcome.code not in (0, None), str(outcome)
    assert "SettingsError: found --only nonsense" in outcome.text, str(outcome)
    assert "memcpy, MPI_Allreduce, mpi: " in outcome.text, str(outcome)


def test_one_rank_says_what_it_needs(tmp_path: Path) -> None:
    """Code 2, and no traceback."""
    mpi = need("openmpi")
    for program in ([JOB], ["-m", "lockstep", "tune"]):
        command = [mpi.python, *program]
        outcome = Program(command, mpi.environment(), tmp_path).finish(LIMIT)
        assert outcome.code == 2, str(outcome)
        assert "needed: 2 or more" in outcome.text
        assert "Traceback" not in outcome.text


SESSION = """
import lockstep
from lockstep.choice import choose
import torch

def main():
    with lockstep.session(backend="mpi") as world:
        print(world.rank, [choose(n, 2, 1, torch.float32) for n in (4, 1000, 10**9)], flush=True)

lockstep.run(main)
"""


def test_tune_writes_what_a_session_then_uses(tmp_path: Path) -> None:
    """Entries that were there stay; what is no table is not overwritten."""
    mpi, table = need("openmpi"), tmp_path / "table.json"
    other = {"ranks": 64, "nodes": 8, "dtype": "float64", "backend": "gloo"}
    rows = [{**other, "up_to_bytes": [[None, "ring"]]}]
    table.write_text(json.dumps({"lockstep all-reduce table": 1, "entries": rows}))
    flags = ["--seconds", "20", "--largest", "4096", "--dtypes", "float32", "--out", str(table)]
    outcome = mpi.run(2, "-m", "lockstep", "tune", *flags, directory=tmp_path, limit=LIMIT)
    assert outcome.code == 0, str(outcome)
    assert "lengths and dtypes measured" in outcome.text
    entries = json.loads(table.read_text())["entries"]
    assert {(e["ranks"], e["nodes"], e["dtype"], e["backend"]) for e in entries} == {
        (64, 8, "float64", "gloo"),
        (2, 1, "float32", "mpi"),
    }
    mine = next(e for e in entries if e["ranks"] == 2)
    assert mine["measured"]["ranks"] == 2

    program = tmp_path / "session.py"
    program.write_text(SESSION)
    outcome = mpi.run(2, str(program), directory=tmp_path, limit=LIMIT, LOCKSTEP_TUNING=str(table))
    assert outcome.code == 0, str(outcome)
    assert f"all-reduces chosen by {table}" in outcome.text
    chosen = [
        next(name for bound, name in mine["up_to_bytes"] if bound is None or n <= bound)
        for n in (4, 1000, 10**9)
    ]
    for rank in (0, 1):
        assert f"{rank} {chosen}" in outcome.text, str(outcome)

    table.write_text("my notes")
    outcome = mpi.run(2, "-m", "lockstep", "tune", *flags, directory=tmp_path, limit=LIMIT)
    assert outcome.code == 1, str(outcome)
    assert "table.json cannot be used" in outcome.text
    assert table.read_text() == "my notes"
