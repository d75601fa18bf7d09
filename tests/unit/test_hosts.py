"""The command `hosts`: what is refused before a host is asked, and what answers mean."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.hosts import judge, network, probe, software
from lockstep.hosts.command import main
from lockstep.hosts.judge import Case
from lockstep.hosts.link import Link, LinkError, kind_of
from lockstep.hosts.survey import Answer, Plan, neighbours

PLAN = Plan(("a", "b", "c"), "/env/bin/python", "/checkout", "/checkout", "/env/bin/mpirun", "/s")
ADDRESSES = {"a": ["10.0.0.1"], "b": ["10.0.0.2"], "c": ["10.0.0.3"]}


def answer(name: str, **changes: Any) -> Answer:
    """Return what a host says that has no fault, with changes."""
    facts = {
        "names": {**ADDRESSES},
        "own": ADDRESSES[name],
        "host": name,
        "python": "3.11.7",
        "bare": "/env/bin/python",
        "packages": dict.fromkeys(PLAN.packages, "1"),
        "mpi": ["Open MPI 5", "/env/lib/libmpi.so"],
        "launcher": ["mpirun 5"],
        "checkout": "abc",
        "directory": True,
        "shared": True,
        "interfaces": [("eth0", ADDRESSES[name][0], 24)],
        "port": 1,
        **changes,
    }
    met = {"number": "abc".index(name), "shared": {"seen": [0, 1, 2], "seconds": 0.0}}
    return Answer(name, name == "a", login=("1", "me", name), facts=facts, met=met)


def case(**changed: dict[str, Any]) -> Case:
    """Return three hosts, some of them changed."""
    return Case(PLAN, [answer(name, **changed.get(name, {})) for name in "abc"])


def everything(it: Case) -> list[tuple[str, str, str]]:
    """Return all faults: host, check, verdict."""
    found = [*judge.names(it), *judge.machines(it), *network.login(it), *network.back(it)]
    found += [*judge.user(it), *software.interpreter(it), *software.packages(it)]
    found += [*software.mpi(it), *software.checkout(it), *judge.clock(it), *network.doors(it)]
    found += [*network.decoys(it, "openmpi"), *network.shared(it, "failed")]
    assert all(one.cure and one.found for one in found)
    return [(one.host, one.check, one.verdict) for one in found]


def test_no_fault() -> None:
    """Hosts that agree."""
    assert everything(case()) == []


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"python": "3.12.0"}, "python"),
        ({"packages": {**dict.fromkeys(PLAN.packages, "1"), "torch": "2"}}, "packages"),
        ({"packages": {**dict.fromkeys(PLAN.packages, "1"), "numpy": ""}}, "packages"),
        ({"mpi": ["Open MPI 4", "/env/lib/libmpi.so"]}, "mpi"),
        ({"mpi": ["Open MPI 5", "/usr/lib/libmpi.so"]}, "mpi"),
        ({"mpi": {"error": "cannot load"}}, "mpi"),
        ({"launcher": ["mpirun 4"]}, "mpi"),
        ({"launcher": {"error": "No such file"}}, "mpi"),
        ({"checkout": ""}, "checkout"),
        ({"checkout": "def"}, "checkout"),
        ({"checkout": {"error": "no answer in 15 s"}}, "checkout"),
        ({"names": {**ADDRESSES, "a": {"error": "unknown"}}}, "name"),
        ({"names": {**ADDRESSES, "b": ["127.0.1.1", "10.0.0.2"]}}, "name"),
        ({"names": {**ADDRESSES, "c": ["10.0.0.9"]}}, "name"),
        ({"shared": {"error": "No such file"}}, "shared"),
    ],
)
@pytest.mark.parametrize("host", "abc")
def test_the_odd_one_is_named(host: str, changes: dict[str, Any], check: str) -> None:
    """Also where it is the machine that asks: the others are more."""
    assert everything(case(**{host: changes})) == [(host, check, "failed")]


def test_the_cure_of_a_name_that_means_the_host_itself(tmp_path: Path) -> None:
    """Done as it is printed, it takes that name out of that line, and nothing else."""
    (found,) = judge.names(case(b={"names": {**ADDRESSES, "b": ["127.0.1.1"]}}))
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost b\n127.0.1.1 other b bb\n127.0.1.1\tb\n10.0.0.2 b\n")
    command = found.cure.partition(": ")[2].replace("/etc/hosts", str(hosts))
    subprocess.run(["sh", "-c", command], check=True)
    left = [line.split() for line in hosts.read_text().splitlines()]
    assert left == [
        ["127.0.0.1", "localhost", "b"],
        ["127.0.1.1", "other", "bb"],
        ["127.0.1.1"],
        ["10.0.0.2", "b"],
    ]


def test_localhost_is_not_taken_out_of_the_hosts_file() -> None:
    """As the name of one of several hosts it is another one everywhere."""
    plan = replace(PLAN, names=("localhost", "b", "c"))
    views = {"localhost": ["127.0.0.1"], "b": ["10.0.0.2"], "c": ["10.0.0.3"]}
    answers = [answer(name, names=views) for name in "abc"]
    cures = [it.cure for it in judge.names(Case(plan, answers)) if "localhost" in it.found]
    assert cures
    assert not any("sed" in cure for cure in cures)


def test_a_bare_python() -> None:
    """Another one elsewhere, or none, is told, unless the launcher takes PATH along."""
    it = case(b={"bare": "/usr/bin/python"}, c={"bare": ""})
    assert [(one.host, one.verdict) for one in software.bare(it, carried=False)] == [
        ("b", "warning"),
        ("c", "warning"),
    ]
    assert software.bare(it, carried=True) == software.bare(case(), carried=False) == []


@pytest.mark.parametrize("host", "abc")
@pytest.mark.parametrize("ahead", [3600.0, -2.5])
def test_clocks(host: str, ahead: float) -> None:
    """One that is off is named; one that is read with that uncertainty is not."""
    for unsure, expected in ((0.01, [(host, "clock", "failed")]), (4000.0, [])):
        whole = case()
        for it in whole.answers:
            shift = ahead if it.name == host else 0.0
            # all are read against the clock of a, which asks
            it.ahead = (shift - (ahead if host == "a" else 0.0), unsure)
        assert everything(whole) == expected


@pytest.mark.parametrize("host", "abc")
def test_another_directory(host: str) -> None:
    """Who sees nobody's file, and whose file nobody sees."""
    whole = case()
    for it in whole.answers:
        own = "abc".index(it.name)
        odd = "abc".index(host)
        it.met["shared"]["seen"] = [own] if own == odd else [i for i in range(3) if i != odd]
    assert everything(whole) == [(host, "shared", "failed")]


def test_who_is_to_blame_for_a_login() -> None:
    """The host that nobody enters; the one that tries, where others get in."""
    denied = "me@x: Permission denied (publickey)."
    whole = case()
    whole.answers[1].met |= {"ssh a": "", "ssh c": denied}
    whole.answers[2].met |= {"ssh a": "", "ssh b": ""}
    assert everything(whole) == [("b", "ssh", "failed")]
    whole = case()
    whole.answers[1].met |= {"ssh a": denied}
    whole.answers[2].met |= {"ssh a": denied}
    assert everything(whole) == [("a", "ssh", "failed")] * 2


def test_one_address_everywhere() -> None:
    """It breaks Open MPI and Intel MPI; MPICH copes."""
    eth = [("eth0", "10.0.0.1", 24)], [("eth0", "10.0.0.2", 24)], [("eth0", "10.0.0.3", 24)]
    docker = ("docker0", "172.17.0.1", 16)
    whole = case(**{n: {"interfaces": [docker, *e]} for n, e in zip("abc", eth, strict=True)})
    by_family = {kind: network.decoys(whole, kind)[0] for kind in ("openmpi", "mpich", "intel")}
    verdicts = {kind: one.verdict for kind, one in by_family.items()}
    assert verdicts == {"openmpi": "failed", "mpich": "warning", "intel": "failed"}
    assert by_family["intel"].cure == "export FI_TCP_IFACE=eth0"


def test_a_host_that_is_out_of_reach() -> None:
    """It is named, and nothing is said about what it could not be asked."""
    whole = case()
    lost = Answer("b", here=False, trouble=LinkError("unreachable", "No route to host"))
    whole = replace(whole, answers=[whole.answers[0], lost, whole.answers[2]])
    assert everything(whole) == [("b", "ssh", "failed")]


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("ssh: Could not resolve hostname x: Name or service not known", "name"),
        ("me@x: Permission denied (publickey,password).", "key"),
        ("Host key verification failed.", "host key"),
        ("ssh: connect to host x port 22: Connection refused", "sshd"),
        ("Connection timed out during banner exchange", "banner"),
        ("ssh: connect to host x port 22: Connection timed out", "unreachable"),
        ("ssh: connect to host x port 22: No route to host", "unreachable"),
        ("something new", "other"),
    ],
)
def test_what_ssh_says(said: str, kind: str) -> None:
    """Its words, of OpenSSH 7 to 10."""
    assert kind_of(said) == kind


def test_a_probe_on_this_machine() -> None:
    """It says who it is, answers, and ends when it is no longer asked."""
    link = Link("localhost", sys.executable, local=True)
    link.greet(20)
    assert len(link.login) == 3
    assert abs(link.ask({"ask": "clock"}, 20)["time"] - time.time()) < 5
    link.close()


@pytest.mark.parametrize(("python", "kind"), [("/no such", "interpreter"), ("/bin/true", "other")])
def test_a_probe_that_does_not_start(python: str, kind: str) -> None:
    """No interpreter, or something else in its place."""
    link = Link("localhost", python, local=True)
    link.greet(20)
    with pytest.raises(LinkError) as caught:
        link.ask({"ask": "clock"}, 20)
    assert caught.value.kind == kind
    link.close()


def test_limits() -> None:
    """What hangs is left behind; what fails is told."""
    start = time.monotonic()
    assert "no answer" in probe.limited(lambda: time.sleep(60), 0.1)["error"]
    assert time.monotonic() - start < 5
    assert probe.limited(lambda: probe.usable("/none"), 5) == {"error": "No such file or directory"}


def test_neighbours() -> None:
    """A ring, also a small one."""
    assert [neighbours(0, n) for n in (1, 2, 3, 5)] == [[], [1], [1, 2], [1, 4]]


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("", ["--mpi", "openmpi"], "line 1: the end, and no host"),
        ("a slots=1\n\na slots=1\n", ["--mpi", "openmpi"], "line 3: found `a slots=1`, but a is"),
        (
            "a:1\n",
            ["--mpi", "openmpi"],
            "line 1: found `a:1`, as MPICH and Intel MPI would have it",
        ),
        ("a slots=1\n", ["--mpi", "intel"], "line 1: found `a slots=1`, as Open MPI would have it"),
        ("a:1\nb:0\n", ["--mpi", "mpich"], "line 2: found `b:0`: 0 ranks"),
    ],
)
def test_a_wrong_hostfile(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    text: str,
    options: Sequence[str],
    words: str,
) -> None:
    """Refused with the line's number, the cure and the code 2, before any host is asked."""
    file = tmp_path / "file"
    file.write_text(text)
    assert main([str(file), *options]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert "to do:" in said


def test_the_other_spelling_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As the message about it promises."""
    file = tmp_path / "file"
    file.write_text("a:2\nb:3\n")
    assert main([str(file), "--write", "openmpi"]) == 0
    assert capsys.readouterr().out == "a slots=2\nb slots=3\n"


def test_this_machine_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No ssh, no network, no shared directory is needed for one host."""
    file = tmp_path / "file"
    file.write_text("localhost\n")
    code = main([str(file), "--json", "--mpi", "openmpi"])
    said = json.loads(capsys.readouterr().out)
    assert [it["name"] for it in said["hosts"]] == ["localhost"]
    assert {it["check"] for it in said["findings"]} <= {"mpi"}  # where there is no MPI at all
    assert code == (1 if said["findings"] else 0)
