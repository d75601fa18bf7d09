"""The program that runs on every host: it answers questions, a line of JSON each way.

It is sent over ssh as text, so it imports nothing but the standard library, and nothing of
Lockstep. What may hang there (a name server, a file server, a library) has a limit. At the end of
its input it removes what it wrote and ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import ipaddress
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

# Seconds: for a file server, a name server, a program that is started, a knock at another host.
FILES, NAMES, PROGRAM, KNOCK = 8.0, 8.0, 15.0, 4.0
# Seconds for an ssh to another host, and for a new file to be seen by another host (8 were seen).
SSH, VISIBLE = 10.0, 12.0
SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "-o", "LogLevel=ERROR", "-T", "-x")
# linux/sockios.h; struct ifreq is a name of 16 bytes and a union of 24.
GET_ADDRESS, GET_NETMASK = 0x8915, 0x891B
MPI_VERSION = (
    "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
    "print(MPI.Get_library_version().splitlines()[0].strip(' \\0')); "
    "print(*{l.split()[-1] for l in open('/proc/self/maps') if '/libmpi' in l})"
)

_written: list[str] = []


def limited(what: Callable[[], Any], seconds: float) -> Any:
    """Return what a function returns, or {"error": text} if it fails or takes longer. Local."""
    result: list[Any] = []

    def call() -> None:
        try:
            result.append(what())
        except BaseException as error:
            text = getattr(error, "strerror", None) or str(error) or type(error).__name__
            result.append({"error": text})

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    return result[0] if result else {"error": f"no answer in {seconds:g} s"}


def at_once(questions: dict[str, tuple[Callable[[], Any], float]]) -> dict[str, Any]:
    """Ask several questions at the same time, each with its limit in seconds. Local."""
    answers: dict[str, Any] = {}

    def ask(name: str, what: Callable[[], Any], seconds: float) -> None:
        answers[name] = limited(what, seconds)

    threads = [threading.Thread(target=ask, args=(n, *q)) for n, q in questions.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def facts(ask: dict[str, Any]) -> dict[str, Any]:
    """Return what this host is and has: everything that must be the same, or fit. Local.

    Args:
        ask: names to resolve, and the paths of checkout, working directory and launcher.
    """
    questions: dict[str, tuple[Callable[[], Any], float]] = {
        "directory": (lambda: os.path.isdir(ask["directory"]), FILES),
        "shared": (lambda: bool(ask["shared"]) and usable(ask["shared"]), FILES),
        "checkout": (lambda: checkout(ask["checkout"]), FILES + 7),
        "packages": (lambda: packages(ask["packages"]), FILES),
        "mpi": (lambda: run([sys.executable, "-c", MPI_VERSION]), PROGRAM + 1),
        "bare": (lambda: shutil.which("python") or "", FILES),
        "own": (lambda: resolve(socket.gethostname()), NAMES),
    }
    if ask["launcher"]:
        questions["launcher"] = (lambda: run([ask["launcher"], "--version"]), PROGRAM + 1)
    for name in ask["names"]:
        questions[f"name {name}"] = (partial(resolve, name), NAMES)
    found = at_once(questions)
    found["names"] = {name: found.pop(f"name {name}") for name in ask["names"]}
    found["host"] = socket.gethostname()
    found["python"] = sys.version.split()[0]
    found["interfaces"] = interfaces()
    return found


def usable(directory: str) -> bool:
    """Return True for a directory that files can be made in, or raise why not. Local."""
    os.listdir(directory)
    if not os.access(directory, os.W_OK | os.X_OK):
        raise OSError(0, "it cannot be written to")
    return True


def resolve(name: str) -> list[str]:
    """Return the IPv4 addresses of a name as this host sees it, or all where it has none. Local."""
    infos = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    found = list(dict.fromkeys(str(info[4][0]) for info in infos))
    return [address for address in found if ":" not in address] or found


def interfaces() -> list[tuple[str, str, int]]:
    """Return name, IPv4 address and bits of the mask of each interface that has one. Local."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):
                address = fcntl.ioctl(probe, GET_ADDRESS, request)[20:24]
                mask = fcntl.ioctl(probe, GET_NETMASK, request)[20:24]
                bits = bin(int.from_bytes(mask, "big")).count("1")
                found.append((name, socket.inet_ntoa(address), bits))
    return [it for it in found if not ipaddress.ip_address(it[1]).is_loopback]


def run(command: Sequence[str]) -> list[str]:
    """Return the lines that a program prints; what it says if it fails is the error. Local."""
    done = subprocess.run(
        list(command),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=PROGRAM,
        check=False,
    )
    lines = done.stdout.decode(errors="replace").split("\n")
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines() or ["it says nothing"]
        raise OSError(0, f"code {done.returncode}: {said[-1][:200]}")
    return [line.strip() for line in lines if line.strip()]


def packages(names: Sequence[str]) -> dict[str, str]:
    """Return the versions of installed packages, "" for one that is not there. Local."""
    from importlib import metadata

    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = ""
    return found


def checkout(root: str) -> str:
    """Return a number for the Python files of a checkout, "" if there are none. Local."""
    files = glob.glob(os.path.join(root, "src", "lockstep", "**", "*.py"), recursive=True)
    files += glob.glob(os.path.join(root, "jobs", "*.py"))
    digest = hashlib.sha256()
    for path in sorted(files):
        with open(path, "rb") as file:
            digest.update(os.path.relpath(path, root).encode() + b"\0" + file.read() + b"\0")
    return digest.hexdigest()[:12] if files else ""


def open_door(number: str) -> int:
    """Answer every caller on a free port with a number, in a thread; return the port. Local."""
    listener = socket.create_server(("", 0), backlog=128)

    def answer() -> None:
        while True:
            with contextlib.suppress(OSError):
                caller, _ = listener.accept()
                with caller:
                    caller.sendall(number.encode())

    threading.Thread(target=answer, daemon=True).start()
    return int(listener.getsockname()[1])


def knock(name: str, port: int, number: str) -> str:
    """Return "" if the door at a name answers with its number, else what happened. Local."""
    try:
        with socket.create_connection((name, port), timeout=KNOCK) as caller:
            heard = b""
            while len(heard) < len(number):
                part = caller.recv(64)
                if not part:
                    break
                heard += part
    except OSError as error:
        return error.strerror or str(error)
    return "" if heard.decode(errors="replace") == number else "another host answers there"


def ssh(name: str) -> str:
    """Return "" if ssh logs into a host without a question, else what it says. Local."""
    command = ["ssh", *SSH_OPTIONS, "--", name, "exit 0"]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=SSH,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer in {SSH:g} s"
    if done.returncode == 0:
        return ""
    said = done.stderr.decode(errors="replace").strip()
    return said[-300:] or f"code {done.returncode}"


def share(directory: str, token: str, mine: int, others: Sequence[int]) -> dict[str, Any]:
    """Write a file into a directory and wait for those of other hosts. Local, with a limit.

    Returns:
        the numbers of the hosts whose files were seen, and the seconds until the last of them.
    """
    start = time.monotonic()
    with open(_file(directory, token, mine), "x") as file:
        _written.append(file.name)
        file.write(token)
    seen: dict[int, float] = {}
    while len(seen) < len(others) and time.monotonic() - start < VISIBLE:
        os.listdir(directory)  # makes some file systems forget that a name was not there
        for other in others:
            with contextlib.suppress(OSError), open(_file(directory, token, other)) as file:
                if file.read() == token:
                    seen.setdefault(other, time.monotonic() - start)
        time.sleep(0.02)
    return {"seen": sorted(seen), "seconds": max(seen.values(), default=0.0)}


def _file(directory: str, token: str, number: int) -> str:
    return os.path.join(directory, f".lockstep-hosts-{token}-{number}")


def meet(ask: dict[str, Any]) -> dict[str, Any]:
    """Try what needs other hosts: their doors, their sshd, the shared directory. Local."""
    questions: dict[str, tuple[Callable[[], Any], float]] = {}
    for name, port, number in ask["doors"]:
        questions[f"door {name}"] = (partial(knock, name, port, number), NAMES + KNOCK)
    for name in ask["ssh"]:
        questions[f"ssh {name}"] = (partial(ssh, name), SSH + 1)
    if ask["shared"]:
        what = partial(share, ask["shared"], ask["token"], ask["number"], ask["others"])
        questions["shared"] = (what, VISIBLE + FILES)
    return at_once(questions)


def clean() -> None:
    """Remove what this probe wrote. Local."""
    for path in _written:
        with contextlib.suppress(OSError):
            os.unlink(path)


def serve() -> None:
    """Answer questions until the input ends. Local."""
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, lambda *_: (limited(clean, 2.0), os._exit(1)))
    signal.alarm(120)  # whoever asked may be gone without a word
    port = 0
    for line in sys.stdin.buffer:
        ask = json.loads(line)
        if ask["ask"] == "facts":
            port = open_door(ask["door"])
            answer = {**facts(ask), "port": port}
        elif ask["ask"] == "clock":
            answer = {"time": time.time()}
        elif ask["ask"] == "meet":
            answer = meet(ask)
        else:
            break
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    limited(clean, 2.0)
    os._exit(0)  # a thread may hang in a file server


if __name__ == "__main__":
    serve()
