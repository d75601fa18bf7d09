"""The table of all-reduces: what it says, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import tuning
from lockstep.allreduce import NAMES
from lockstep.errors import SettingsError, StorageError
from lockstep.tuning import Entry, Key, default_place, place, read, steps, write

KEY = Key(4, 1, "float32", "mpi")
ENTRY = Entry((100, 10_000), ("recursive_doubling", "ring", "mpi"))


def test_bounds_belong_to_the_lower_algorithm() -> None:
    """Up to and with."""
    found = [ENTRY.choose(n) for n in (0, 100, 101, 10_000, 10_001, 2**40)]
    assert found == ["recursive_doubling"] * 2 + ["ring"] * 2 + ["mpi"] * 2


def test_an_entry_from_what_was_measured() -> None:
    """The change is between the lengths on both sides of it."""
    entry = steps([(4, "shared"), (16, "shared"), (64, "ring"), (256, "ring"), (1024, "shared")])
    assert entry.algorithms == ("shared", "ring", "shared")
    assert entry.bounds == (32, 512)
    assert steps([(4, "ring")]) == Entry((), ("ring",))


def test_what_was_written_is_read(tmp_path: Path) -> None:
    """Several entries, in a directory that is made."""
    table = {KEY: ENTRY, Key(8, 2, "bfloat16", "gloo"): Entry((), ("ring",), {"when": "today"})}
    path = tmp_path / "new" / "table.json"
    write(path, table)
    found = read(path, NAMES)
    assert found == table
    assert found[Key(8, 2, "bfloat16", "gloo")].measured == {"when": "today"}
    assert [file.name for file in path.parent.iterdir()] == ["table.json"]


def test_chooses_for_exactly_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another number of ranks or nodes, another dtype, another backend: no answer."""
    monkeypatch.setattr(tuning, "_table", {KEY: ENTRY})
    assert tuning.choose(50, 4, 1, torch.float32) == "recursive_doubling"
    assert tuning.choose(500, 4, 1, torch.float32, "mpi") == "ring"
    assert tuning.choose(50, 3, 1, torch.float32) is None
    assert tuning.choose(50, 4, 2, torch.float32) is None
    assert tuning.choose(50, 4, 1, torch.float64) is None
    assert tuning.choose(50, 4, 1, torch.float32, "gloo") is None
    tuning.forget()
    assert tuning.choose(50, 4, 1, torch.float32) is None


def good() -> dict[str, Any]:
    """Return the content of a file that is right."""
    row = {"ranks": 4, "nodes": 1, "dtype": "float32", "backend": "mpi"}
    row["up_to_bytes"] = [[100, "ring"], [None, "mpi"]]  # type: ignore[assignment]
    return {"lockstep all-reduce table": 1, "entries": [row]}


def test_the_good_one_is_good(tmp_path: Path) -> None:
    """So that the bad ones below are bad for their own reason."""
    path = tmp_path / "table.json"
    path.write_text(json.dumps(good()))
    assert read(path, NAMES) == {KEY: Entry((100,), ("ring", "mpi"))}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"lockstep all-reduce table": 2}, "format is 2"),
        ({"lockstep all-reduce table": None}, "no such table"),
        ({"entries": {}}, "no list of entries"),
        ({"entries": [7]}, "entry 1: found 7"),
        ({"entries": good()["entries"] * 2}, "entry 2 is there twice"),
        ({"ranks": 0}, "0 ranks on 1 nodes"),
        ({"ranks": True}, "True ranks"),
        ({"nodes": 5}, "4 ranks on 5 nodes"),
        ({"dtype": "int8"}, "dtype 'int8'"),
        ({"backend": "ucc"}, "backend 'ucc'"),
        ({"up_to_bytes": []}, "no list up_to_bytes"),
        ({"up_to_bytes": [["ring"]]}, "a list of"),
        ({"up_to_bytes": [[100, "ring"]]}, "null in the last row"),
        ({"up_to_bytes": [[None, "ring"], [None, "mpi"]]}, "whole numbers"),
        ({"up_to_bytes": [[9, "ring"], [9, "mpi"], [None, "ring"]]}, "do not ascend"),
        ({"up_to_bytes": [[None, "butterfly"]]}, "no all-reduce 'butterfly'"),
        ({"up_to_bytes": [[None, ["ring"]]]}, "no all-reduce"),
    ],
)
def test_refuses_by_name(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    """The message names the file, what is wrong, and what to do."""
    content = good()
    for key, value in change.items():
        (content if key in content else content["entries"][0])[key] = value
    path = tmp_path / "table.json"
    path.write_text(json.dumps(content))
    with pytest.raises(SettingsError, match=r"to do: .*lockstep tune") as caught:
        read(path, NAMES)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b"null"])
def test_refuses_what_is_no_table(tmp_path: Path, content: bytes) -> None:
    """Empty, cut off, another thing, no text, nested without end."""
    path = tmp_path / "table.json"
    path.write_bytes(content)
    with pytest.raises(SettingsError, match=r"table\.json cannot be used"):
        read(path, NAMES)


def test_where_a_table_is(tmp_path: Path) -> None:
    """The variable comes first; 0 means none; a named file that is missing is an error."""
    table = tmp_path / "lockstep" / "allreduce.json"
    environ = {"XDG_CONFIG_HOME": str(tmp_path), "HOME": "/nowhere"}
    assert place(environ) is None
    table.parent.mkdir()
    table.write_text("{}")
    assert place(environ) == table
    other = tmp_path / "other.json"
    with pytest.raises(SettingsError, match="no such file"):
        place({**environ, "LOCKSTEP_TUNING": str(other)})
    other.write_text("{}")
    assert place({**environ, "LOCKSTEP_TUNING": str(other)}) == other
    assert place({**environ, "LOCKSTEP_TUNING": "0"}) is None
    home = default_place({"XDG_CONFIG_HOME": "relative", "HOME": "/home/me"})
    assert home == Path("/home/me/.config/lockstep/allreduce.json")


def test_cannot_write(tmp_path: Path) -> None:
    """A file where a directory is needed."""
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="write the table"):
        write(tmp_path / "file" / "table.json", {KEY: ENTRY})
