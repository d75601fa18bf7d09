"""The hosts themselves: whole, separate, and gone at the end."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hostfaults import FAULTS
from hostlab import ROOT
from hosts_fixtures import Hosts

LAB = ROOT / "tests" / "cluster" / "hosts-lab"


def test_every_host_reaches_every_other(hosts: Hosts) -> None:
    """By name, by ssh, without a question; and each has a name and a network of its own."""
    each = "for name; do ssh -o BatchMode=yes $name hostname; done"
    for name in hosts.names:
        assert hosts.run(name, "hostname").split() == [name]
        assert hosts.run(name, "sh", "-c", each, "sh", *hosts.names).split() == hosts.names


@pytest.mark.parametrize("place", ["/tmp", "/run", "/dev/shm", "/etc"])
def test_private_places(hosts: Hosts, place: str) -> None:
    """What one host writes there no other sees, nor the machine."""
    file = f"{place}/only-here"
    hosts.run(hosts.names[0], "touch", file)
    seen = [hosts.lab.host(name).run("ls", file, check=False) for name in hosts.names[1:]]
    assert all("No such file" in text for text in seen), seen
    assert not Path(file).exists()
    hosts.run(hosts.names[0], "rm", file)


def test_the_shared_directory(hosts: Hosts) -> None:
    """What one host writes there all see, also outside."""
    file = hosts.shared / "file"
    hosts.run(hosts.names[2], "sh", "-c", 'echo here >"$1"', "sh", file)
    assert [hosts.run(name, "cat", file) for name in hosts.names] == ["here\n"] * len(hosts.names)
    assert file.read_text() == "here\n"


def test_every_fault_is_healed(hosts: Hosts) -> None:
    """After each fault, made and undone, a host is as before."""
    arguments = {"no-name": hosts.names[0], "other-address": hosts.names[0], "hide": "/mnt"}
    name = hosts.names[2]
    shown = (
        "cat /etc/hosts /etc/passwd; ip -br -4 addr; tc qdisc; date +%Y-%m-%dT%H; "
        "df --output=size /dev/shm; mount | sed 's/,size=[0-9]*k//' | sort"
    )
    before = hosts.run(name, "sh", "-c", shown)
    for fault in sorted(set(FAULTS) - {"other-mpi"}):
        hosts.fault(name, fault, arguments.get(fault, ""))
        hosts.heal()
        ssh = hosts.run(hosts.names[0], "ssh", "-o", "BatchMode=yes", name, "hostname", limit=10)
        assert ssh.split() == [name], fault
    assert hosts.run(name, "sh", "-c", shown) == before


def test_down_leaves_nothing() -> None:
    """A second lab, ended: no process, no directory, no mount, no network."""
    env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LOCKSTEP_LAB": "second"}
    env["LOCKSTEP_LAB_NET"] = "10.79.1"

    def named() -> set[str]:
        script = "ls /run; cat /proc/mounts; ip -br addr; ps axww -o pid,args"
        shown = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
        return {it for it in shown.stdout.splitlines() if "second" in it or "10.79.1." in it}

    # whatever else on this machine has the word in its command line
    others = named()
    up = subprocess.run([LAB, "up", "2"], env=env, capture_output=True, text=True, check=True)
    assert "second2 10.79.1.12" in up.stdout
    assert any(line.startswith("lockstep-second") for line in named() - others)
    subprocess.run([LAB, "down"], env=env, check=True, timeout=20)
    assert named() - others == set()
