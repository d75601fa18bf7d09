"""`python -m lockstep hosts` names each fault and its host, in under a minute."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from hosts_fixtures import Hosts
from launching import ROOT, Launcher, Outcome, need

# Seconds: what is promised.
LIMIT = 60.0


@pytest.fixture
def mpi() -> Launcher:
    """Return Open MPI."""
    return need("openmpi")


def ask(
    hosts: Hosts,
    mpi: Launcher,
    directory: Path,
    file: Path | None = None,
    *options: str,
    cwd: object = ROOT,
) -> Outcome:
    """Run the command on the first host."""
    file = file or hosts.hostfile("openmpi")
    command = ["env", "-C", cwd, mpi.python, "-m", "lockstep", "hosts", file, *options]
    outcome = hosts.start(command, directory, env=mpi.environment()).finish(LIMIT)
    assert not outcome.timed_out, outcome
    return outcome


def findings(outcome: Outcome) -> list[dict[str, Any]]:
    """Return the faults in the JSON that was printed."""
    assert outcome.code in (0, 1), outcome
    found: list[dict[str, Any]] = json.loads(outcome.text[outcome.text.index("{") :])["findings"]
    assert all(it["cure"] for it in found), found
    return found


def test_whole_hosts(hosts: Hosts, mpi: Launcher, tmp_path: Path) -> None:
    """No fault, a line a host, and nothing is left on any of them or in the directory."""
    file = hosts.hostfile("openmpi")
    outcome = ask(hosts, mpi, tmp_path, file, "--shared", str(hosts.shared))
    assert outcome.code == 0, outcome
    for name in hosts.names:
        line = next(line for line in outcome.text.splitlines() if line.startswith(name))
        assert line.split()[1:] == ["ok"] * 10, outcome
    assert "ok: 4 hosts fit together" in outcome.text, outcome
    assert hosts.leftovers() == []
    assert list(hosts.shared.iterdir()) == []


def test_another_python_is_told(hosts: Hosts, mpi: Launcher, tmp_path: Path) -> None:
    """A warning where a bare `python` is another on other hosts, and mpirun takes no PATH along."""
    file = hosts.hostfile("openmpi", hosts.names[:2])
    command = [mpi.python, "-m", "lockstep", "hosts", file, "--shared", hosts.shared]
    for listed in ("PATH", ""):
        env = mpi.environment(OMPI_MCA_mca_base_env_list=listed)
        outcome = hosts.start(command, tmp_path, env=env, name=f"out{listed}").finish(LIMIT)
        assert outcome.code == 0, outcome
        text = f"{hosts.names[1]}: warning: python: mpirun takes no PATH along"
        assert (text in outcome.text) == (listed == ""), outcome


# Faults that are made together: fault, on which host (counted from 0), its argument, which check
# finds it there, words of the finding.
Row = tuple[str, int, str, str, str]
FAULTS: dict[str, list[Row]] = {
    "login": [
        ("no-key", 1, "", "ssh", "{h[1]} does not let {h[0]} in without a password"),
        ("no-sshd", 2, "", "ssh", "no sshd answers on {h[2]}"),
        ("stopped-sshd", 3, "", "ssh", "the sshd of {h[3]} takes the connection"),
    ],
    "reach": [
        ("no-host-key", 1, "", "ssh", "{h[1]} does not trust the host key of"),
        ("cut", 3, "", "ssh", "{h[0]} does not reach {h[3]}"),
    ],
    "names": [
        ("no-name", 1, "{h[3]}", "name", "the name {h[3]} does not resolve on {h[1]}"),
        ("loopback-name", 2, "", "name", "the name {h[2]} means 127.0.1.1 on {h[2]}"),
        ("other-address", 3, "{h[1]}", "name", "means {a[3]} on {h[3]}, elsewhere {a[1]}"),
    ],
    "shared directory": [
        ("no-share", 1, "", "shared", "cannot be used on {h[1]}: No such file"),
        ("other-share", 2, "", "shared", "is another directory on {h[2]} than on {h[0]}, {h[3]}"),
        ("clock", 3, "", "clock", "the clock of {h[3]} is 3600 s ahead"),
    ],
    "software": [
        ("hide", 1, "{venv}", "python", "no interpreter {python} on {h[1]}"),
        ("hide", 2, "{root}/src", "checkout", "the files of {root} are others on {h[2]}"),
        ("clock", 3, "-1h", "clock", "the clock of {h[3]} is 3600 s behind"),
    ],
    "the machine that asks": [
        ("no-key", 0, "", "ssh", "{h[0]} does not let"),
        ("loopback-name", 0, "", "name", "the name {h[0]} means 127.0.1.1 on {h[0]}"),
        (
            "other-share",
            0,
            "",
            "shared",
            "is another directory on {h[0]} than on {h[1]}, {h[2]}, {h[3]}",
        ),
    ],
}


@pytest.mark.parametrize("rows", FAULTS.values(), ids=FAULTS)
def test_faults_are_named(hosts: Hosts, mpi: Launcher, tmp_path: Path, rows: list[Row]) -> None:
    """Each with its host and its check; and nothing else is blamed."""
    names = {"venv": mpi.venv, "python": mpi.python, "root": ROOT, "h": hosts.names}
    names["a"] = [host.address for host in hosts.lab.hosts]
    file = hosts.hostfile("openmpi")
    expected = {}
    for fault, index, argument, check, words in rows:
        hosts.fault(hosts.names[index], fault, argument.format(**names))
        expected[hosts.names[index], check] = words.format(**names)
    outcome = ask(hosts, mpi, tmp_path, file, "--shared", str(hosts.shared), "--json")
    found = findings(outcome)
    texts = "\n".join(str(it) for it in found)
    assert outcome.code == 1, texts
    assert {(it["host"], it["check"]) for it in found} == set(expected), texts
    assert all(expected[it["host"], it["check"]] in it["found"] for it in found), texts


def test_the_working_directory_is_missing(hosts: Hosts, mpi: Launcher, tmp_path: Path) -> None:
    """It is on no shared path, and so not on the third host."""
    file = hosts.hostfile("openmpi")
    hosts.fault(hosts.names[2], "no-share")
    outcome = ask(hosts, mpi, tmp_path, file, "--json", cwd=hosts.shared)
    assert outcome.code == 1, outcome
    broken = [it for it in findings(outcome) if it["verdict"] == "failed"]
    assert [(it["host"], it["check"]) for it in broken] == [(hosts.names[2], "checkout")], outcome
    assert f"no working directory {hosts.shared} on {hosts.names[2]}" in broken[0]["found"]


def test_another_user_id(hosts: Hosts, mpi: Launcher, tmp_path: Path) -> None:
    """The same name, another number; what that user may not read is a fault of its own."""
    hosts.fault(hosts.names[2], "other-uid")
    outcome = ask(hosts, mpi, tmp_path, None, "--json")
    found = {it["check"]: it for it in findings(outcome)}
    assert {it["host"] for it in found.values()} == {hosts.names[2]}, outcome
    assert "root (uid 1234), elsewhere root (uid 0)" in found["user"]["found"], outcome


def test_one_address_on_every_host(hosts: Hosts, mpi: Launcher, tmp_path: Path) -> None:
    """docker0: Open MPI wants to be told; once it is, the address may stay."""
    hosts.fault("all", "decoy")
    file = hosts.hostfile("openmpi", hosts.names[:2])
    outcome = ask(hosts, mpi, tmp_path, file, "--json")
    (found,) = findings(outcome)
    assert found["verdict"] == "failed", outcome
    assert (
        f"docker0 has the address 172.17.0.1 on 2 hosts ({', '.join(hosts.names[:2])})"
        in found["found"]
    )
    assert found["cure"] == "export OMPI_MCA_btl_tcp_if_include=eth0", outcome
    env = mpi.environment(OMPI_MCA_btl_tcp_if_include="eth0")
    command = [mpi.python, "-m", "lockstep", "hosts", file, "--json"]
    outcome = hosts.start(command, tmp_path, env=env, name="told").finish(LIMIT)
    assert outcome.code == 0, outcome
    assert [it["verdict"] for it in findings(outcome)] == ["warning"], outcome


def test_another_version_of_the_mpi(
    hosts: Hosts, mpi: Launcher, tmp_path: Path, other_openmpi: Path
) -> None:
    """A real one, at the same path: library and launcher are both told apart."""
    hosts.fault(hosts.names[2], "other-mpi", f"{other_openmpi}={mpi.venv}")
    outcome = ask(hosts, mpi, tmp_path, None, "--json")
    assert outcome.code == 1, outcome
    found = findings(outcome)
    assert {(it["host"], it["check"]) for it in found} == {(hosts.names[2], "mpi")}, outcome
    text = " ".join(it["found"] for it in found)
    assert "the MPI library of" in text, outcome
    assert f"{mpi.mpirun} is mpirun (Open MPI) 5.0." in text, outcome


def test_a_host_that_is_not_there(hosts: Hosts, mpi: Launcher, tmp_path: Path) -> None:
    """A name that nobody knows, and two names of one machine."""
    again = hosts.lab.hosts[1].address
    file = hosts.hostfile("openmpi", [*hosts.names[:2], again, "nobody"])
    outcome = ask(hosts, mpi, tmp_path, file, "--json")
    twice, unknown = findings(outcome)
    assert (twice["host"], unknown["host"]) == (again, "nobody"), outcome
    assert "are one machine, which calls itself" in twice["found"], outcome
    assert "does not resolve on any host" in unknown["found"], outcome


def test_it_may_be_killed(hosts: Hosts, mpi: Launcher, tmp_path: Path) -> None:
    """The probes on the other hosts end by themselves."""
    file = hosts.hostfile("openmpi")
    hosts.fault(hosts.names[3], "stopped-sshd")
    command = [mpi.python, "-m", "lockstep", "hosts", file]
    program = hosts.start(command, tmp_path, env=mpi.environment())
    end = time.monotonic() + LIMIT
    while not any("lockstep-probe" in line for line in hosts.leftovers()):
        assert time.monotonic() < end, program.text()
    program.process.kill()
    program.end()
    while hosts.leftovers():
        assert time.monotonic() < end, hosts.leftovers()


def test_on_a_terminal(hosts: Hosts, mpi: Launcher, tmp_path: Path) -> None:
    """A table in colours."""
    file = hosts.hostfile("openmpi", hosts.names[:2])
    typed = f"{mpi.python} -m lockstep hosts {file}"
    command = ["script", "-qec", typed, "/dev/null"]
    outcome = hosts.start(command, tmp_path, env=mpi.environment(TERM="xterm")).finish(LIMIT)
    assert outcome.code == 0, outcome
    assert "┏" in outcome.text, outcome
    assert "\x1b[32mok" in outcome.text, outcome
