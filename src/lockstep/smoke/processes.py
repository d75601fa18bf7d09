"""What has become of a process that does not answer. Local; Linux."""

from __future__ import annotations

from pathlib import Path

_STATES = {
    "R": "runs",
    "S": "waits for something",
    "D": "waits for a disk or a file server",
    "I": "is idle",
    "T": "is stopped (SIGSTOP, or Ctrl-Z)",
    "t": "is stopped by a debugger",
    "Z": "has died",
    "X": "has died",
}


def state(pid: int) -> str:
    """Say in a few words how a process of this host is."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "is gone"
    # the name before it may hold blanks and brackets
    letter = text.rpartition(")")[2].split()[0]
    return _STATES.get(letter, f"is in the state {letter}")


def cure(host: str, pid: int, condition: str) -> str:
    """Say what to type about a process in that condition."""
    if "stopped" in condition:
        return f"ssh {host} kill -CONT {pid}"
    if "gone" in condition or "died" in condition:
        return f"ssh {host} 'dmesg | tail'   # out of memory? a crash? and what that rank printed"
    if "file server" in condition:
        return f"ssh {host} df   # a mount that does not answer hangs there"
    if condition:
        return f"ssh {host} py-spy dump --pid {pid}"
    return f"ping {host}; ssh {host} ps -o pid,stat,wchan:20,cmd -p {pid}"
