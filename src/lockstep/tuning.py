"""Which all-reduce is the fastest here: a table that `python -m lockstep tune` has measured.

The table is a JSON file: a list of entries, each for one number of ranks and nodes, one dtype and
one backend, with the algorithm for every length in bytes. What has not been measured is not
guessed: for other numbers of ranks or nodes the built-in choice holds.

The root alone reads the file, so that all ranks choose alike, also where the file is on one node
only. It is the one that LOCKSTEP_TUNING names (0: none), else ``lockstep/allreduce.json`` in the
user's directory of settings, XDG_CONFIG_HOME or ~/.config.
"""

from __future__ import annotations

import bisect
import itertools
import json
import os
import tempfile
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lockstep.errors import SettingsError, counted
from lockstep.files import failure, write_text
from lockstep.rendezvous.agree import from_root
from lockstep.world import World

VARIABLE = "LOCKSTEP_TUNING"
FORMAT = 1
DTYPES = {"float32", "float64", "bfloat16", "float16"}
BACKENDS = {"mpi", "gloo", "nccl"}
_LARGEST_FILE = 4 * 2**20
_CURE = f"`mpirun -np N python -m lockstep tune --out FILE` makes one; {VARIABLE}=0 uses none"


@dataclass(frozen=True)
class Key:
    """What an entry was measured with: it holds for exactly this.

    Attributes:
        ranks, nodes: of the group.
        dtype: such as "float32".
        backend: of torch.distributed.
    """

    ranks: int
    nodes: int
    dtype: str
    backend: str


@dataclass(frozen=True)
class Entry:
    """The algorithms by length.

    Attributes:
        bounds: in bytes, ascending; a buffer takes the first bound that it does not exceed.
        algorithms: one more than bounds; the last is for what exceeds all of them.
        measured: what it was measured with, for readers.
    """

    bounds: tuple[int, ...]
    algorithms: tuple[str, ...]
    measured: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def choose(self, nbytes: int) -> str:
        """Return the algorithm for a buffer of so many bytes. Local."""
        return self.algorithms[bisect.bisect_left(self.bounds, nbytes)]


Table = dict[Key, Entry]
_table: Table = {}


def choose(
    nbytes: int, ranks: int, nodes: int, dtype: torch.dtype, backend: str = "mpi"
) -> str | None:
    """Return the all-reduce that was the fastest in the table of this session. Local.

    The same on all ranks, as the table is.

    Args:
        nbytes: length of the buffer.
        ranks, nodes: of the group.
        dtype: of the buffer.
        backend: of the group.

    Returns:
        a name of `lockstep.allreduce.ALGORITHMS`; None if this was not measured.
    """
    if not _table:
        return None
    entry = _table.get(Key(ranks, nodes, str(dtype).removeprefix("torch."), backend))
    return entry.choose(nbytes) if entry else None


def load(world: World, known: Collection[str]) -> str:
    """Read the table of this user, if there is one. Collective.

    Args:
        world: the ranks.
        known: names of algorithms that there are.

    Returns:
        what to say of it; nothing if there is no table.

    Raises:
        SettingsError: on all ranks, if the root cannot read the file or it is no such table.
    """
    global _table
    found: tuple[Table, str, SettingsError | None] = {}, "", None
    if world.rank == 0:
        try:
            path = place()
            if path is not None:
                found = read(path, known), str(path), None
        except SettingsError as error:
            found = {}, "", error
    _table, path_read, trouble = from_root(world, found)
    if trouble is not None:
        raise trouble
    if not path_read:
        return ""
    if any((key.ranks, key.nodes) == (world.size, world.nodes) for key in _table):
        return f"all-reduces chosen by {path_read}"
    return (
        f"{path_read} was not measured on {counted(world.size, 'rank')} and "
        f"{counted(world.nodes, 'node')}: "
        "all-reduces chosen by the built-in table"
    )


def forget() -> None:
    """Choose nothing any more. Local."""
    global _table
    _table = {}


def default_place(environ: Mapping[str, str] = os.environ) -> Path:
    """Return where a table is looked for if no variable names one. Local."""
    home = environ.get("XDG_CONFIG_HOME", "")
    # The standard says that a relative path there is to be ignored.
    base = Path(home) if home.startswith("/") else Path(environ.get("HOME", "/")) / ".config"
    return base / "lockstep" / "allreduce.json"


def place(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the file to read, None if there is none. Local.

    Raises:
        SettingsError: the variable names a file that is not there.
    """
    named = environ.get(VARIABLE, "")
    if named == "0":
        return None
    path = Path(named) if named else default_place(environ)
    if path.is_file():
        return path
    if named:
        raise SettingsError(f"{VARIABLE}={named}: no such file", needed="a table", cure=_CURE)
    return None


def read(path: Path, known: Collection[str]) -> Table:
    """Read a table and check all of it. Local.

    Raises:
        SettingsError: naming the file and what is wrong in it.
    """
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise ValueError(f"is larger than {_LARGEST_FILE >> 20} MiB")
        return _parse(json.loads(path.read_text(encoding="utf-8")), known)
    except (OSError, ValueError, RecursionError) as error:
        raise SettingsError(
            f"the table of all-reduces {path} cannot be used: {error}",
            needed=f"a table of format {FORMAT}, as `python -m lockstep tune` writes it",
            cure=_CURE,
        ) from error


def write(path: Path, table: Table) -> None:
    """Write a table, whole or not at all. Local.

    Raises:
        StorageError: it cannot be written there.
    """
    rows = [{**vars(key), **_spell(entry)} for key, entry in table.items()]
    text = json.dumps({"lockstep all-reduce table": FORMAT, "entries": rows}, indent=1) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    except OSError as error:
        raise failure(error, "write the table of all-reduces", path) from error


def require_writable(path: Path) -> None:
    """Try whether a table can be written, before it is measured. Local.

    Raises:
        StorageError: it cannot.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent) as file:
            file.write(b"0")
    except OSError as error:
        raise failure(error, "write the table of all-reduces", path) from error


def steps(pairs: Iterable[tuple[int, str]]) -> Entry:
    """Make an entry of lengths in bytes, ascending, and the fastest algorithm at each. Local.

    Between two lengths with different algorithms the change is at their geometric mean.
    """
    bounds: list[int] = []
    algorithms: list[str] = []
    before = 0
    for nbytes, algorithm in pairs:
        if not algorithms or algorithms[-1] != algorithm:
            if algorithms:
                bounds.append(int((before * nbytes) ** 0.5))
            algorithms.append(algorithm)
        before = nbytes
    return Entry(tuple(bounds), tuple(algorithms))


def _spell(entry: Entry) -> dict[str, Any]:
    limits = [*entry.bounds, None]
    rows = [[limit, name] for limit, name in zip(limits, entry.algorithms, strict=True)]
    return {"up_to_bytes": rows, "measured": dict(entry.measured)}


def _parse(content: Any, known: Collection[str]) -> Table:
    version = content.get("lockstep all-reduce table") if isinstance(content, dict) else None
    if version is None:
        raise ValueError("it is no such table")
    if version != FORMAT:
        raise ValueError(f"its format is {version!r}")
    table: Table = {}
    rows = content.get("entries")
    if not isinstance(rows, list):
        raise ValueError("it has no list of entries")
    for number, row in enumerate(rows, start=1):
        try:
            key, entry = _key(row), _entry(row, known)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"entry {number}: {error}") from error
        if key in table:
            raise ValueError(f"entry {number} is there twice: {key}")
        table[key] = entry
    return table


def _key(row: Any) -> Key:
    if not isinstance(row, dict):
        raise ValueError(f"found {str(row)[:60]}")
    ranks, nodes = row.get("ranks"), row.get("nodes")
    if type(ranks) is not int or type(nodes) is not int or not 1 <= nodes <= ranks:
        raise ValueError(f"found {ranks!r} ranks on {nodes!r} nodes")
    dtype, backend = row.get("dtype"), row.get("backend")
    if dtype not in DTYPES or backend not in BACKENDS:
        raise ValueError(f"found dtype {dtype!r} and backend {backend!r}")
    return Key(ranks, nodes, dtype, backend)


def _entry(row: dict[str, Any], known: Collection[str]) -> Entry:
    limits = row.get("up_to_bytes")
    if not isinstance(limits, list) or not limits:
        raise ValueError("it has no list up_to_bytes")
    pairs = [(one[0], one[1]) if isinstance(one, list) and len(one) == 2 else one for one in limits]
    if not all(isinstance(one, tuple) for one in pairs):
        raise ValueError("up_to_bytes is a list of [bytes, algorithm]")
    bounds = tuple(bound for bound, _ in pairs[:-1])
    if not all(type(bound) is int and bound > 0 for bound in bounds) or pairs[-1][0] is not None:
        raise ValueError("bytes are whole numbers, and null in the last row")
    if any(a >= b for a, b in itertools.pairwise(bounds)):
        raise ValueError("bytes do not ascend")
    algorithms = tuple(name for _, name in pairs)
    for name in algorithms:
        if not isinstance(name, str) or name not in known:
            raise ValueError(f"there is no all-reduce {str(name)[:60]!r} here")
    measured = row.get("measured")
    return Entry(bounds, algorithms, measured if isinstance(measured, dict) else {})
