"""The command line: ``python -m lockstep COMMAND``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

# name: the module that has a main(argv), and what the command does
COMMANDS: dict[str, tuple[str, str]] = {
    "tune": ("lockstep.bench.tune", "which all-reduce is the fastest here? (under mpirun)"),
    "hosts": ("lockstep.hosts.command", "do the hosts of a hostfile make a cluster?"),
}


def main(argv: Sequence[str]) -> int:
    """Run a command and return its exit code; 2 if there is no such command. Local."""
    if argv and argv[0] in COMMANDS:
        return importlib.import_module(COMMANDS[argv[0]][0]).main(argv[1:])
    asked = bool(argv) and argv[0] in ("-h", "--help")
    lines = ["usage: python -m lockstep COMMAND ...", ""]
    lines += [f"  {name:<8} {about}" for name, (_, about) in COMMANDS.items()]
    if argv and not asked:
        lines[:0] = [f"found the command {argv[0]!r}; needed: one of those below"]
    print("\n".join(lines), file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
