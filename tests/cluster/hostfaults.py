"""Faults of the lab's hosts: each can be made, and healed again, while the host runs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hostlab import Host
from labtools import LabError, Task, sh, until

DECOY = "172.17.0.1/16"
FAKETIME = "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1"
BURNERS = 3


@dataclass(frozen=True)
class Fault:
    """How a fault is made and healed; both take the host and the fault's argument, "" if none."""

    about: str
    make: Callable[[Host, str], None]
    heal: Callable[[Host, str], None]


def _etc(host: Host, name: str) -> Path:
    return host.own / "etc" / name


def _move(host: Host, name: str, suffix: str, back: bool = False) -> None:
    there, away = _etc(host, name), _etc(host, name + suffix)
    (away if back else there).rename(there if back else away)


def _signal_sshd(host: Host, number: int) -> None:
    host.run("bash", "-c", f"kill -{number} $(cat /run/sshd.pid)")


def _decoy(host: Host, _: str) -> None:
    host.run("ip", "link", "add", "docker0", "type", "veth", "peer", "name", "docker0-end")
    for words in (
        f"addr add {DECOY} dev docker0",
        "link set docker0-end up",
        "link set docker0 up",
    ):
        host.run("ip", *words.split())


def _cable(host: Host, state: str) -> None:
    host.lab.ip("link", "set", host.port, state)


def _hide(host: Host, path: str) -> None:
    host.run("mount", "-t", "tmpfs", "-o", "size=1m,mode=755", "lab", path)


def _show(host: Host, path: str) -> None:
    host.run("umount", "-l", path)


def _no_locks(host: Host, _: str) -> None:
    """Mount the first host's directory by sshfs, whose locks end at each host."""
    first, shared = host.lab.hosts[0], host.lab.shared
    if host == first:
        raise LabError("no-locks is for the other hosts: the first one has the file system itself")
    host.run(
        "sshfs", "-o", "ssh_command=ssh -F /etc/ssh/ssh_config", f"{first.name}:{shared}", shared
    )


def _other_mpi(host: Host, argument: str) -> None:
    """Lay the files of one directory over another: OVER=DIRECTORY, read only."""
    over, _, there = argument.partition("=")
    host.run("mount", "-t", "overlay", "-o", f"ro,lowerdir={over}:{there}", "lab", there)


def _clock(host: Host, shift: str) -> None:
    """Shift the time of day that programs read which are started on this host from now on.

    Linux has one such clock for all namespaces. libfaketime stands in for a second one, preloaded
    into all that comes in by ssh or by ``exec``; not into sshd, whose sandbox it does not survive.
    """
    if not os.path.exists(FAKETIME):
        raise LabError(f"{FAKETIME} is missing: apt-get install faketime")
    _set_variables(host, f"LD_PRELOAD={FAKETIME} FAKETIME={shift or '+1h'}")


def _set_variables(host: Host, text: str) -> None:
    (host.own / "variables").write_text(text)
    host.stop_sshd()
    host.start_sshd()


def _slow(host: Host, rate: str) -> None:
    """Limit a cable both ways."""
    words = ["root", "tbf", "rate", rate or "50mbit", "burst", "64kb", "latency", "50ms"]
    switch = ["nsenter", "-t", str(host.lab.switch.pid), "-n", "--"]
    sh(*switch, "tc", "qdisc", "replace", "dev", host.port, *words)
    host.run("tc", "qdisc", "replace", "dev", "eth0", *words)


def _fast(host: Host, _: str) -> None:
    switch = ["nsenter", "-t", str(host.lab.switch.pid), "-n", "--"]
    sh(*switch, "tc", "qdisc", "del", "dev", host.port, "root")
    host.run("tc", "qdisc", "del", "dev", "eth0", "root")


def _pin(host: Host, cores: set[int]) -> None:
    """Keep a host's processes, and all that they start, on some cores."""
    for pid in [host.init.pid, *_all_of(host)]:
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(pid, cores)


def _all_of(host: Host) -> list[int]:
    inside = os.readlink(f"/proc/{host.init.pid}/ns/pid")
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.readlink(entry / "ns/pid") == inside:
                found.append(int(entry.name))
    return found


def _busy(host: Host, _: str) -> None:
    """Give a host the last core alone, and fill that with programs that compute for ever."""
    core = max(os.sched_getaffinity(0))
    _pin(host, {core})
    for number in range(BURNERS):  # a session each: the scheduler shares time between sessions
        command = ["taskset", "-c", str(core), *host.command("sh", "-c", "while :; do :; done")]
        null = subprocess.DEVNULL
        burner = subprocess.Popen(
            command, stdin=null, stdout=null, stderr=null, start_new_session=True
        )
        Task(host.own / f"burner{number}").note(burner.pid)
    until(
        lambda: sum("while :" in line for line in host.processes().values()) == BURNERS, "burners"
    )


def _idle(host: Host, _: str) -> None:
    for pid, line in host.processes().items():
        if "while :" in line:
            os.kill(pid, signal.SIGKILL)
    for number in range(BURNERS):
        Task(host.own / f"burner{number}").end()
    _pin(host, os.sched_getaffinity(0))


def _shm(host: Host, size: str) -> None:
    # What killed ranks have left there would not fit.
    host.run("find", "/dev/shm", "-mindepth", "1", "-delete")
    host.run("mount", "-o", f"remount,size={size}", "/dev/shm")


def _other_uid(host: Host, uid: str) -> None:
    """Let the name root mean another number on this host."""
    path = _etc(host, "passwd")
    lines = path.read_text().splitlines(keepends=True)
    first = lines[0].split(":")
    first[2] = uid or "1234"
    path.write_text("".join([":".join(first), *lines[1:]]))


def _right_names(host: Host, _: str) -> None:
    host.write_hosts()


FAULTS: dict[str, Fault] = {
    "no-key": Fault(
        "its sshd knows no key",
        lambda h, _: _move(h, "ssh/lab_authorized", ".off"),
        lambda h, _: _move(h, "ssh/lab_authorized", ".off", back=True),
    ),
    "no-host-key": Fault(
        "it knows no host's key",
        lambda h, _: _move(h, "ssh/lab_known", ".off"),
        lambda h, _: _move(h, "ssh/lab_known", ".off", back=True),
    ),
    "no-sshd": Fault("no sshd runs", lambda h, _: h.stop_sshd(), lambda h, _: h.start_sshd()),
    "stopped-sshd": Fault(
        "its sshd takes connections and never answers",
        lambda h, _: _signal_sshd(h, signal.SIGSTOP),
        lambda h, _: _signal_sshd(h, signal.SIGCONT),
    ),
    "no-name": Fault(
        "NAME does not resolve there", lambda h, name: h.write_hosts(without=name), _right_names
    ),
    "loopback-name": Fault(
        "its own name means 127.0.1.1",
        lambda h, _: h.write_hosts(first=f"127.0.1.1 {h.name}"),
        _right_names,
    ),
    "other-address": Fault(
        "NAME means this host's own address there",
        lambda h, name: h.write_hosts(first=f"{h.address} {name}", without=name),
        _right_names,
    ),
    "decoy": Fault(
        f"a second interface, docker0, with the address {DECOY}",
        _decoy,
        lambda h, _: h.run("ip", "link", "del", "docker0") and None,
    ),
    "cut": Fault("its cable is cut", lambda h, _: _cable(h, "down"), lambda h, _: _cable(h, "up")),
    "hide": Fault("PATH is an empty directory there", _hide, _show),
    "no-share": Fault(
        "the shared directory is not there",
        lambda h, _: _hide(h, str(h.lab.shared.parent)),
        lambda h, _: _show(h, str(h.lab.shared.parent)),
    ),
    "other-share": Fault(
        "the shared directory is another one there",
        lambda h, _: _hide(h, str(h.lab.shared)),
        lambda h, _: _show(h, str(h.lab.shared)),
    ),
    "no-locks": Fault(
        "the shared directory comes by sshfs, without locks",
        _no_locks,
        lambda h, _: _show(h, str(h.lab.shared)),
    ),
    "other-mpi": Fault(
        "OVER=DIRECTORY: the files of OVER lie over those of DIRECTORY",
        _other_mpi,
        lambda h, argument: _show(h, argument.partition("=")[2]),
    ),
    "clock": Fault(
        "its clock is off by +1h, or the time given", _clock, lambda h, _: _set_variables(h, "")
    ),
    "slow": Fault("its cable is slow: 50mbit, or the rate given", _slow, _fast),
    "busy": Fault("it has one core, and others compute there", _busy, _idle),
    "small-shm": Fault(
        "/dev/shm holds 1 MiB, or the size given",
        lambda h, size: _shm(h, size or "1m"),
        lambda h, _: _shm(h, "4g"),
    ),
    "other-uid": Fault(
        "root is uid 1234 there, or the number given", _other_uid, lambda h, _: _other_uid(h, "0")
    ),
}
