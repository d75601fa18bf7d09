"""A small cluster on one machine: hosts made of Linux namespaces, for root on Debian.

A host has its own network (a cable to a switch that is a namespace too), name, process numbers,
IPC, /tmp, /run, /dev/shm, /etc, ssh keys and sshd. Everything else is the machine's own, so that
checkout and Python are there as on a shared file system; ``Lab.shared`` is a directory for data.
Nothing is seen outside: with its processes a host is gone, and the state directory goes last.

From outside: LOCKSTEP_LAB (name, "lab"), LOCKSTEP_LAB_NET (first three numbers of the addresses),
LOCKSTEP_LAB_KEEP (directories below /tmp, /run or /dev/shm that the hosts shall see, by colons).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from labtools import START, LabError, Task, install, sh, until

ROOT = Path(__file__).resolve().parents[2]
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# PID 1 of a host. Its number outside is what the machine's own /proc says.
INIT = r"""
set -eu
read -r pid rest </proc/self/stat
hostname "$1"; state=$2; own=$3; shift 3
mount -t proc proc /proc
[ ! -d ~/.ssh ] || mount -t tmpfs -o mode=700 lab ~/.ssh
for place in tmp run dev/shm; do
    mkdir -p "$own/$place"
    mount -t tmpfs -o size=4g,mode=1777 lab "$own/$place"
    for keep; do case $keep in "/$place/"*)
        mkdir -p "$own$keep"; mount --bind "$keep" "$own$keep" ;;
    esac; done
done
for place in tmp dev/shm run; do mount --rbind "$own/$place" "/$place"; done
mount --bind "$own/etc" /etc
mkdir -p /run/sshd
chmod 755 /run /run/sshd
echo "$pid" >"$own/pid.new" && mv "$own/pid.new" "$own/pid"
while :; do sleep infinity & wait $! || :; done
"""
SSHD = """\
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
MaxStartups 100
HostKey /etc/ssh/lab_host
AuthorizedKeysFile /etc/ssh/lab_authorized
PidFile /run/sshd.pid
Subsystem sftp internal-sftp
"""
SSH = """\
Host *
  IdentityFile /etc/ssh/lab_key
  GlobalKnownHostsFile /etc/ssh/lab_known
  UserKnownHostsFile /dev/null
  StrictHostKeyChecking yes
"""


@dataclass(frozen=True)
class Host:
    """One host of the lab."""

    lab: Lab
    number: int

    @property
    def name(self) -> str:
        """lab1, lab2, ..."""
        return f"{self.lab.name}{self.number}"

    @property
    def address(self) -> str:
        """Its address on the lab's network."""
        return f"{self.lab.net}.{10 + self.number}"

    @property
    def port(self) -> str:
        """The switch's end of its cable."""
        return f"port{self.number}"

    @property
    def own(self) -> Path:
        """Its part of the state directory."""
        return self.lab.state / self.name

    @property
    def init(self) -> Task:
        """Its first process."""
        return Task(self.own / "init")

    def command(self, *argv: object, directory: object = "/") -> list[str]:
        """Return the command that runs a program inside, for use outside."""
        if not (pid := self.init.pid):
            raise LabError(f"{self.name} is not up: hosts-lab up")
        enter = ["nsenter", "-t", str(pid), "-m", "-u", "-i", "-n", "-p", "--"]
        clean = ["env", "-u", "SSH_AUTH_SOCK", "-C", str(directory), *self.variables()]
        return [*enter, *clean, *(str(word) for word in argv)]

    def variables(self) -> list[str]:
        """Return what every program of this host gets into its environment, as NAME=VALUE."""
        with contextlib.suppress(OSError):
            return (self.own / "variables").read_text().split()
        return []

    def run(self, *argv: object, limit: float = START, check: bool = True) -> str:
        """Run a program inside and return what it printed."""
        return sh(*self.command(*argv), limit=limit, check=check)

    def processes(self) -> dict[int, str]:
        """Return what runs inside beside init and sshd: number outside, command line."""
        inside = os.readlink(f"/proc/{self.init.pid}/ns/pid")
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                line = words.decode(errors="replace").strip()
                plain = line and not line.startswith(
                    ("sshd: /usr", "sleep infinity", "bash -c \nset")
                )
                if plain and os.readlink(entry / "ns/pid") == inside:
                    found[int(entry.name)] = line
        return found

    def start(self) -> None:
        """Make it: namespaces, cable, sshd."""
        shutil.rmtree(self.own, ignore_errors=True)
        self.own.mkdir(mode=0o700)
        self._make_etc()
        home = os.path.expanduser("~root")
        command = ["env", "-i", f"PATH={PATH}", f"HOME={home}", "LANG=C.UTF-8"]
        command += ["unshare", "-m", "-u", "-i", "-n", "-p", "--fork", "--kill-child"]
        command += ["--propagation", "private", "bash", "-c", INIT, "bash", self.name]
        command += [str(self.lab.state), str(self.own), *self.lab.keep()]
        with (self.own / "log").open("wb") as log:
            outer = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        Task(self.own / "outer").note(outer.pid)
        pid = self.own / "pid"
        until(lambda: pid.exists() or outer.poll() is not None, f"start of {self.name}")
        if not pid.exists():
            raise LabError(f"{self.name} did not start:\n{(self.own / 'log').read_text()}")
        self.init.note(int(pid.read_text()))
        cable = ["link", "add", self.port, "type", "veth", "peer", "name", "eth0"]
        self.lab.ip(*cable, "netns", self.init.pid)
        self.lab.ip("link", "set", self.port, "master", "br0", "up")
        for words in ("link set lo up", f"addr add {self.address}/24 dev eth0", "link set eth0 up"):
            self.run("ip", *words.split())
        self.start_sshd()

    def start_sshd(self) -> None:
        """Start its sshd, which goes into the background by itself."""
        options = [f"-oSetEnv={' '.join(self.variables())}"] if self.variables() else []
        command = ["/usr/sbin/sshd", *options, "-E", self.own / "sshd.log"]
        sh(*self.command("env", "-i", f"PATH={PATH}", *command))
        knock = ("timeout", "1", "bash", "-c", f"exec 3<>/dev/tcp/{self.address}/22")
        until(lambda: not self.run(*knock, check=False), f"the sshd of {self.name}")

    def stop_sshd(self) -> None:
        """End its sshd; connections that are open stay so."""
        self.run("bash", "-c", "kill $(cat /run/sshd.pid)")
        gone = ("bash", "-c", "[ ! -e /run/sshd.pid ] || echo still there")
        until(lambda: not self.run(*gone), f"the end of the sshd of {self.name}")

    def _make_etc(self) -> None:
        etc, keys = self.own / "etc", self.lab.state / "keys"
        sh("cp", "-a", "/etc", etc)
        (etc / "resolv.conf").unlink(missing_ok=True)
        (etc / "resolv.conf").touch()
        lines = (etc / "nsswitch.conf").read_text().splitlines()
        lines = [line for line in lines if not line.startswith("hosts:")] + ["hosts: files"]
        (etc / "nsswitch.conf").write_text("\n".join(lines) + "\n")
        (etc / "hostname").write_text(self.name + "\n")
        self.write_hosts()
        shutil.rmtree(etc / "ssh", ignore_errors=True)
        (etc / "ssh").mkdir()
        files = {"sshd_config": SSHD, "ssh_config": SSH}
        files["lab_authorized"] = (keys / "user.pub").read_text()
        public = " ".join((keys / "host.pub").read_text().split()[:2])
        files["lab_known"] = "".join(f"{h.name},{h.address} {public}\n" for h in self.lab.hosts)
        for name, text in files.items():
            (etc / "ssh" / name).write_text(text)
        for source, name in (("user", "lab_key"), ("host", "lab_host")):
            shutil.copy(keys / source, etc / "ssh" / name)

    def write_hosts(self, first: str = "", without: str = "") -> None:
        """Write its /etc/hosts: every host's name, a line before them, one host left out."""
        lines = ["127.0.0.1 localhost", first] if first else ["127.0.0.1 localhost"]
        lines += [f"{h.address} {h.name}" for h in self.lab.hosts if h.name != without]
        (self.own / "etc" / "hosts").write_text("\n".join(lines) + "\n")


class Lab:
    """All hosts, their switch and their state directory."""

    def __init__(self, name: str = "", net: str = "") -> None:
        self.name = name or os.environ.get("LOCKSTEP_LAB", "lab")
        self.net = net or os.environ.get("LOCKSTEP_LAB_NET", "10.79.0")
        self.state = Path("/run") / f"lockstep-{self.name}"
        self.shared = self.state / "mount" / "shared"
        self.switch = Task(self.state / "switch")

    @property
    def hosts(self) -> list[Host]:
        """The hosts that were asked for, up or not."""
        with contextlib.suppress(OSError, ValueError):
            return [Host(self, i + 1) for i in range(int((self.state / "size").read_text()))]
        return []

    def host(self, name: str) -> Host:
        """Return a host by its name."""
        for one in self.hosts:
            if one.name == name:
                return one
        raise LabError(f"no host {name}; there are {[one.name for one in self.hosts] or 'none'}")

    @property
    def is_up(self) -> bool:
        """Whether the switch and every host run."""
        return bool(self.switch.pid and self.hosts and all(h.init.pid for h in self.hosts))

    def keep(self) -> list[str]:
        """Return the directories that a host sees though they lie below one of its own."""
        wanted = [str(self.state), str(ROOT), sys.prefix, sys.base_prefix]
        wanted += os.environ.get("LOCKSTEP_LAB_KEEP", "").split(":")
        names = ("OPENMPI", "MPICH", "IMPI")
        wanted += [os.environ.get(f"LOCKSTEP_TEST_{name}", "") for name in names]
        return [w for w in dict.fromkeys(wanted) if w.startswith(("/tmp/", "/run/", "/dev/shm/"))]

    def ip(self, *words: object) -> None:
        """Run ip(8) at the switch."""
        sh("nsenter", "-t", self.switch.pid, "-n", "--", "ip", *words)

    def up(self, size: int) -> None:
        """Start so many hosts; those of another size, or half gone, are ended before."""
        if self.is_up and len(self.hosts) == size:
            return
        install()
        self.down()
        self.shared.mkdir(parents=True, mode=0o755)
        keys = self.state / "keys"
        keys.mkdir(mode=0o700)
        for name in ("user", "host"):
            sh("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "lab", "-f", keys / name)
        (self.state / "size").write_text(str(size))
        command = ["unshare", "-n", "sleep", "infinity"]
        null = subprocess.DEVNULL
        switch = subprocess.Popen(
            command, stdin=null, stdout=null, stderr=null, start_new_session=True
        )
        self.switch.note(switch.pid)
        mine = os.readlink("/proc/self/ns/net")
        until(lambda: os.readlink(f"/proc/{switch.pid}/ns/net") != mine, "the switch's network")
        self.ip("link", "add", "br0", "type", "bridge")
        self.ip("link", "set", "br0", "up")
        for host in self.hosts:
            host.start()

    def down(self) -> None:
        """End every host and the switch, and remove the state directory."""
        for host in self.hosts:
            host.init.end()  # the rest of its processes go with the first
            Task(host.own / "outer").end()
        self.switch.end()
        shutil.rmtree(self.state, ignore_errors=True)

    def leftovers(self) -> list[str]:
        """Return what runs on any host beside init and sshd."""
        return [f"{h.name}: {line}" for h in self.hosts for line in h.processes().values()]
