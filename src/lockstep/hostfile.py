"""Hostfiles: read and write the spellings of the launchers, or take the hosts from Slurm.

    Open MPI           node1 slots=2
    MPICH, Intel MPI   node1:2

None of the launchers reads the other's spelling correctly, and most take what they do not
understand without a word. So a file is refused here with the line's number, before a launch.
Everything is Local and starts nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lockstep.errors import HostfileError
from lockstep.launcher import Family, allocation

Spelling = Literal["openmpi", "hydra"]

# What may stand for a host: letters, digits, dots, dashes; nothing that ssh takes for an option
# and nothing that a shell takes for anything.
_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,252}[A-Za-z0-9_])?", re.ASCII)
# Further words of a line that the launchers know and that are nothing to Lockstep.
_OPENMPI_KEYS = ("max_slots", "max-slots")
_HYDRA_KEYS = ("binding", "user")
_MOST = 1_000_000
_OPTION = {
    "openmpi": "mpirun --hostfile F",
    "hydra": "mpiexec -f F (MPICH), -machinefile F (Intel)",
}
_EXAMPLE = {"openmpi": "node1 slots=2", "hydra": "node1:2"}
_WHOSE = {"openmpi": "Open MPI", "hydra": "MPICH and Intel MPI"}


@dataclass(frozen=True)
class Host:
    """A line of a hostfile: a name and how many ranks; None where the line does not say."""

    name: str
    slots: int | None = None


def spelling_of(family: Family) -> Spelling:
    """Return how an MPI spells hostfiles. Local."""
    return "openmpi" if family == "openmpi" else "hydra"


def is_name(text: str) -> bool:
    """Say whether a text may be the name or the IPv4 address of a host. Local."""
    return _NAME.fullmatch(text) is not None


def read(path: Path, spelling: Spelling | None = None) -> tuple[Host, ...]:
    """Return the hosts of a file, in its order. Local.

    Args:
        path: the hostfile.
        spelling: the one that its launcher needs; None takes either, but not both in one file.

    Raises:
        HostfileError: it cannot be read, is empty, or a line of it is wrong.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise HostfileError(
            f"the hostfile {path} cannot be read: {reason}",
            needed="a text file with a host a line",
            cure=f"`ls -l {path}`; hostfiles/README.md has examples",
        ) from None
    return parse(text, spelling, str(path))


def parse(text: str, spelling: Spelling | None = None, name: str = "hostfile") -> tuple[Host, ...]:
    """Return the hosts of a hostfile's text; as `read`. Local.

    Args:
        text: lines; blank ones and comments, from a ``#`` on, count for nothing.
        spelling: as in `read`.
        name: of the file, for messages.
    """
    hosts: list[Host] = []
    lines: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        body, comment, _ = line.partition("#")
        words = re.sub(r"\s*=\s*", "=", body).split()
        if not words:
            continue
        where = f"{name}, line {number}: found `{line.strip()[:80]}`"
        host, used = _host(words, where, spelling)
        spelling = spelling or used
        if comment and spelling == "hydra":
            raise HostfileError(
                f"{where}, with a comment behind the host, at which MPICH stops",
                needed="a comment on a line of its own",
                cure=f"move `#{line.partition('#')[2][:40]}` to a line before this one",
            )
        if host.name in lines:
            raise HostfileError(
                f"{where}, but {host.name} is in line {lines[host.name]} already",
                needed="each host once, with all its ranks",
                cure=f"write the sum of the ranks into line {lines[host.name]}, remove this one",
            )
        lines[host.name] = number
        hosts.append(host)
    if not hosts:
        raise HostfileError(
            f"{name}, line {max(1, len(text.splitlines()))}: the end, and no host before it",
            needed="a host a line",
            cure=f"write a line such as `{_EXAMPLE[spelling or 'openmpi']}` (hostfiles/README.md)",
        )
    return tuple(hosts)


def write(hosts: Sequence[Host], spelling: Spelling) -> str:
    """Return the text of a hostfile. Local."""
    form = "{} slots={}\n" if spelling == "openmpi" else "{}:{}\n"
    return "".join(
        f"{host.name}\n" if host.slots is None else form.format(host.name, host.slots)
        for host in hosts
    )


def from_slurm(environ: Mapping[str, str] = os.environ) -> tuple[Host, ...]:
    """Return the hosts of the Slurm job around this process, with its tasks on each. Local.

    Raises:
        HostfileError: there is no job, or its list is not understood.
    """
    nodes, tasks = allocation(environ)
    if not nodes:
        raise HostfileError(
            "there is no Slurm job around this process, and no hostfile was given",
            needed="a hostfile, or a job's list of nodes",
            cure="give the hostfile's name; inside of `sbatch` or `salloc` none is needed",
        )
    names = expand(nodes)
    counts = _tasks(tasks)
    if len(counts) != len(names):
        return tuple(Host(name) for name in names)
    return tuple(Host(name, count) for name, count in zip(names, counts, strict=True))


def expand(nodes: str) -> list[str]:
    """Return the names in a list as Slurm writes it: ``a,rack[1-2]n[01-03,7]``. Local.

    Raises:
        HostfileError: it is not such a list.
    """
    names: list[str] = []
    # commas inside of brackets do not part names
    for item in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", nodes):
        found = [""]
        for part in re.findall(r"\[[^\[\]]*\]|[^\[\]]+", item):
            ends = _numbers(part[1:-1], nodes) if part.startswith("[") else [part]
            if len(found) * len(ends) > _MOST:
                raise _not_a_list(nodes)
            found = [one + end for one in found for end in ends]
        names += found
    if (
        not names
        or not all(is_name(name) for name in names)
        or nodes.count("[") != nodes.count("]")
    ):
        raise _not_a_list(nodes)
    return names


def _numbers(ranges: str, nodes: str) -> list[str]:
    """Return what stands in brackets, leading zeros kept: 01-03,7 is 01, 02, 03, 7."""
    found: list[str] = []
    for one in ranges.split(","):
        match = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", one, re.ASCII)
        if match is None:
            raise _not_a_list(nodes)
        first, last = match[1], match[2] or match[1]
        if not 0 <= int(last) - int(first) < _MOST:
            raise _not_a_list(nodes)
        found += [str(i).zfill(len(first)) for i in range(int(first), int(last) + 1)]
    return found


def _tasks(text: str) -> list[int]:
    """Return the tasks a node from Slurm's 2(x3),1, which is 2, 2, 2, 1; nothing if unclear."""
    found: list[int] = []
    for one in text.split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]{1,6})\))?", one, re.ASCII)
        if match is None:
            return []
        found += [int(match[1])] * int(match[2] or 1)
    return found


def _not_a_list(nodes: str) -> HostfileError:
    return HostfileError(
        f"the job's list of nodes is {nodes[:80]!r}",
        needed="names as Slurm writes them, such as node[01-04,7]",
        cure="`scontrol show hostnames` prints the names; write them into a hostfile",
    )


def _host(
    words: Sequence[str], where: str, spelling: Spelling | None
) -> tuple[Host, Spelling | None]:
    """Return the host of a line, and the spelling if the line shows it."""
    name, colon, count = words[0].partition(":")
    if not is_name(name):
        raise HostfileError(
            where,
            needed="a host's name or IPv4 address: letters, digits, dots, dashes",
            cure="write the name as `ssh` takes it, without a user in front of it",
        )
    keys = dict(word.partition("=")[::2] for word in words[1:])
    used: Spelling | None = None
    if colon or any(key in _HYDRA_KEYS for key in keys):
        used = "hydra"
    elif "slots" in keys or any(key in _OPENMPI_KEYS for key in keys):
        used = "openmpi"
    if used and spelling and used != spelling:
        raise _other_spelling(where, name, count if colon else keys.get("slots", ""), spelling)
    known = ("slots", *_OPENMPI_KEYS) if used == "openmpi" else _HYDRA_KEYS
    if strange := [word for word in words[1:] if word.partition("=")[0] not in known]:
        example = _EXAMPLE[used or spelling or "openmpi"]
        raise HostfileError(
            f"{where}, where `{strange[0]}` means nothing",
            needed=f"a line such as `{example}`",
            cure=f"remove `{strange[0]}`, or put a # before it",
        )
    text = count if colon else keys.get("slots")
    return Host(name, None if text is None else _slots(text, where)), used


def _slots(text: str, where: str) -> int:
    if re.fullmatch(r"[0-9]{1,7}", text, re.ASCII) and 1 <= int(text) <= _MOST:
        return int(text)
    what = "0 ranks" if text.strip("0") == "" and text else f"{text!r} is not a number of ranks"
    raise HostfileError(
        f"{where}: {what}",
        needed="how many ranks the host takes, 1 or more",
        cure="write the number; a host without ranks is left out by a # before its line",
    )


def _other_spelling(where: str, name: str, count: str, spelling: Spelling) -> HostfileError:
    other = "hydra" if spelling == "openmpi" else "openmpi"
    count = count if count.isdecimal() else "2"
    right = f"{name} slots={count}" if spelling == "openmpi" else f"{name}:{count}"
    return HostfileError(
        f"{where}, as {_WHOSE[other]} would have it",
        needed=f"`{right}` for {_WHOSE[spelling]}: {_OPTION[spelling]}",
        cure=f"`python -m lockstep hosts FILE --write {spelling}` prints the file in that spelling",
    )
