"""Hostfiles: the three spellings, Slurm's lists, and what is wrong in which line."""

from __future__ import annotations

from pathlib import Path

import pytest

from launching import ROOT
from lockstep.errors import HostfileError
from lockstep.hostfile import Host, Spelling, expand, from_slurm, parse, read, spelling_of, write

PAIR = (Host("node1", 2), Host("node2", 2))
OPENMPI = "node1 slots=2\nnode2 slots=2\n"
HYDRA = "node1:2\nnode2:2\n"


@pytest.mark.parametrize(("spelling", "text"), [("openmpi", OPENMPI), ("hydra", HYDRA)])
def test_there_and_back(spelling: Spelling, text: str) -> None:
    """What is written is read, and the other way."""
    assert write(PAIR, spelling) == text
    assert parse(text, spelling) == PAIR
    assert parse(text) == PAIR


def test_comments_blank_lines_and_bare_names() -> None:
    """They are allowed in both spellings; a bare name does not say how many ranks."""
    text = "# two hosts\n\n  node1  slots = 2 max_slots=4 # fast\n\tnode2\n"
    assert parse(text, "openmpi") == (Host("node1", 2), Host("node2"))
    assert parse("# x\nnode1:2 binding=user:0\n\n10.0.0.7\n", "hydra") == (
        Host("node1", 2),
        Host("10.0.0.7"),
    )
    assert write((Host("node2"),), "hydra") == write((Host("node2"),), "openmpi") == "node2\n"


@pytest.mark.parametrize(
    ("text", "spelling", "line", "words"),
    [
        ("", None, 1, "no host"),
        ("# nothing\n\n", None, 2, "no host"),
        ("a slots=1\n# x\nb slots=1\na slots=2\n", "openmpi", 4, "a is in line 1 already"),
        ("a:1\na:1\n", "hydra", 2, "a is in line 1 already"),
        ("a slots=1\nb:2\n", "openmpi", 2, "`b slots=2` for Open MPI"),
        ("a slots=2\n", "hydra", 1, "`a:2` for MPICH and Intel MPI"),
        ("a slots=2\nb:2\n", None, 2, "`b slots=2` for Open MPI"),
        ("a:2\nb slots=2\n", None, 2, "`b:2` for MPICH and Intel MPI"),
        ("a slots=0\n", "openmpi", 1, "0 ranks"),
        ("\na:0\n", "hydra", 2, "0 ranks"),
        ("a slots=two\n", "openmpi", 1, "'two' is not a number of ranks"),
        ("a slots=-1\n", "openmpi", 1, "'-1' is not a number of ranks"),
        ("a slots=1.5\n", "openmpi", 1, "'1.5' is not a number of ranks"),
        ("a slots=\n", "openmpi", 1, "'' is not a number of ranks"),
        ("a:\n", "hydra", 1, "'' is not a number of ranks"),
        ("a:1\nb:2 # fast\n", None, 2, "a comment behind the host"),
        ("a:2 ifname=eth0\n", "hydra", 1, "`ifname=eth0` means nothing"),
        ("a:٢\n", "hydra", 1, "is not a number of ranks"),
        ("a slot=2\n", "openmpi", 1, "`slot=2` means nothing"),
        ("a 2\n", None, 1, "`2` means nothing"),
        ("-oProxyCommand=x\n", None, 1, "a host's name"),
        ("a;reboot slots=1\n", "openmpi", 1, "a host's name"),
        ("$(id):2\n", "hydra", 1, "a host's name"),
        ("me@a slots=1\n", "openmpi", 1, "a host's name"),
    ],
)
def test_the_line_is_named(text: str, spelling: Spelling | None, line: int, words: str) -> None:
    """Each mistake is refused with the number of its line, what is needed and what to do."""
    with pytest.raises(HostfileError) as caught:
        parse(text, spelling, "file")
    assert f"file, line {line}:" in str(caught.value)
    assert words in str(caught.value)
    assert caught.value.needed
    assert caught.value.cure


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    """Missing, or not a text."""
    with pytest.raises(HostfileError, match="No such file"):
        read(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00node")
    with pytest.raises(HostfileError, match="not text"):
        read(tmp_path / "binary")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-10,12]", ["n08", "n09", "n10", "n12"]),
        ("a,b[1,3],c", ["a", "b1", "b3", "c"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("n[1-2].cluster", ["n1.cluster", "n2.cluster"]),
    ],
)
def test_slurms_lists(text: str, names: list[str]) -> None:
    """As `scontrol show hostnames` expands them."""
    assert expand(text) == names


@pytest.mark.parametrize(
    "text", ["", "n[1-", "n1]", "n[a-b]", "n[3-1]", "n[1-9999999]", "n[]", "a b"]
)
def test_not_slurms_list(text: str) -> None:
    """Something else is refused, and nothing large is built for it."""
    with pytest.raises(HostfileError):
        expand(text)


def test_hosts_of_a_slurm_job() -> None:
    """Names with their tasks; without them where Slurm does not say."""
    job = {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "2(x2),1"}
    assert from_slurm(job) == (Host("n1", 2), Host("n2", 2), Host("n3", 1))
    assert from_slurm({**job, "SLURM_TASKS_PER_NODE": "2"}) == (Host("n1"), Host("n2"), Host("n3"))
    with pytest.raises(HostfileError, match="no Slurm job"):
        from_slurm({})


EXAMPLES = [path for path in sorted((ROOT / "hostfiles").iterdir()) if path.suffix != ".md"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_examples(path: Path) -> None:
    """Each is good in the spelling of its MPI, and wrong in the other."""
    family = {"openmpi": "openmpi", "mpich": "mpich", "impi": "intel"}[path.suffix[1:]]
    spelling = spelling_of(family)  # type: ignore[arg-type]
    expected = PAIR if path.stem == "two-nodes" else (Host("localhost", 4),)
    assert read(path, spelling) == expected
    with pytest.raises(HostfileError, match="would have it"):
        read(path, "hydra" if spelling == "openmpi" else "openmpi")


def test_there_are_examples() -> None:
    """One host and two, for each MPI."""
    assert len(EXAMPLES) == 6
