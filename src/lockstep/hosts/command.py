"""``python -m lockstep hosts HOSTFILE``: do these hosts make a cluster? Before any MPI."""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import lockstep.hosts
from lockstep import hostfile
from lockstep.errors import LockstepError, SettingsError, counted
from lockstep.hosts import judge, network, probe, software
from lockstep.hosts.judge import CHECKS, Case, Finding
from lockstep.hosts.show import Report, as_json, show
from lockstep.hosts.survey import Plan, survey
from lockstep.launcher import Family, carries_path, family

_FAMILIES: tuple[Family, ...] = ("openmpi", "mpich", "intel")
_ABOUT = """\
Ask every host of a hostfile, before any MPI, what a launch over them needs: names, ssh, user,
interpreter, packages, MPI, checkout, clock, network, shared directory. Exit code 0: they fit
together, with warnings perhaps; 1: a fault, each with host and cure; 2: it could not be asked.
"""


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code. Local; takes a minute at most."""
    options = _parser().parse_args(argv)
    try:
        if options.write:
            sys.stdout.write(hostfile.write(_hosts(options.hostfile, None), options.write))
            return 0
        report = check(
            options.hostfile,
            mpi=options.mpi,
            python=options.python,
            launcher=options.launcher,
            shared=options.shared,
        )
    except LockstepError as error:
        print(f"lockstep: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(as_json(report))
    else:
        show(report)
    return 1 if report.verdict == "failed" else 0


def check(
    path: Path | None,
    *,
    mpi: str = "auto",
    python: str = sys.executable,
    launcher: str | None = None,
    shared: Path | None = None,
) -> Report:
    """Ask the hosts of a hostfile, or of the Slurm job around. Local, a minute at most.

    Args:
        path: the hostfile; None takes the hosts from Slurm.
        mpi: openmpi, mpich or intel, for the spelling; auto asks the library of the interpreter.
        python: the interpreter on every host.
        launcher: path of mpirun; "" leaves it out; None looks beside the interpreter and on PATH.
        shared: directory that has to be shared; None tries the working directory, and warns.

    Raises:
        LockstepError: the hostfile is wrong, or there is no ssh.
    """
    start = time.monotonic()
    kind = _family(mpi, python)
    spelling = None if kind == "other" else hostfile.spelling_of(kind)
    names = tuple(host.name for host in _hosts(path, spelling))
    if len(names) > 1 and shutil.which("ssh") is None:
        raise SettingsError(
            "there is no ssh on PATH", needed="ssh, to ask the hosts", cure="apt-get install ssh"
        )
    launcher = _launcher(python, kind) if launcher is None else launcher
    plan = _plan(names, python, launcher, shared)
    case = Case(plan, survey(plan))
    # in a Slurm job mpirun starts by srun, which takes everything along
    carried = path is None or kind == "other" or carries_path(kind)
    found = _findings(case, kind, "failed" if shared else "warning", carried)
    count = counted(len(names), "host")
    asked = f"asked from {socket.gethostname()}, interpreter {python}"
    title = f"{count} of {path or 'the Slurm job'}, {asked}"
    return Report(title, case, found, time.monotonic() - start)


def _plan(names: tuple[str, ...], python: str, launcher: str, shared: Path | None) -> Plan:
    root = Path(lockstep.hosts.__file__).parents[3]
    return Plan(
        names=names,
        python=python,
        # an installed package without a checkout counts by its version alone
        checkout=str(root) if (root / "src" / "lockstep").is_dir() else "",
        directory=str(Path.cwd()),
        launcher=launcher,
        shared=str(shared.absolute() if shared else Path.cwd()) if len(names) > 1 else "",
    )


def _findings(case: Case, kind: Family, severity: str, carried: bool) -> list[Finding]:
    """Return all faults, in the order of the hosts and of the checks, none twice."""
    found = [
        *judge.names(case),
        *judge.machines(case),
        *network.login(case),
        *network.back(case),
        *judge.user(case),
        *software.interpreter(case),
        *software.bare(case, carried),
        *software.packages(case),
        *software.mpi(case),
        *software.checkout(case),
        *judge.clock(case),
        *network.doors(case),
        *network.decoys(case, kind),
        *network.shared(case, severity),
    ]
    order = [it.name for it in case.answers]
    rank = {name: number for number, name in enumerate([*order, *case.plan.names])}
    return sorted(
        dict.fromkeys(found), key=lambda it: (rank.get(it.host, 0), CHECKS.index(it.check))
    )


def _hosts(path: Path | None, spelling: hostfile.Spelling | None) -> tuple[hostfile.Host, ...]:
    return hostfile.from_slurm() if path is None else hostfile.read(path, spelling)


def _family(mpi: str, python: str) -> Family:
    for kind in _FAMILIES:
        if mpi == kind:
            return kind
    answer = probe.limited(lambda: probe.run([python, "-c", probe.MPI_VERSION]), probe.PROGRAM)
    return "other" if judge.error_of(answer) or not answer else family(answer[0])


def _launcher(python: str, kind: Family) -> str:
    """Return the launcher beside the interpreter, or the one on PATH, "" if there is none."""
    for name in ("mpirun", "mpiexec") if kind == "openmpi" else ("mpiexec", "mpirun"):
        beside = os.path.join(os.path.dirname(python), name)
        if found := beside if os.access(beside, os.X_OK) else shutil.which(name):
            return os.path.abspath(found)
    return ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lockstep hosts",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("hostfile", type=Path, nargs="?", help="without it, the nodes of the Slurm job")
    add("--mpi", choices=("auto", *_FAMILIES), default="auto", help="whose spelling is needed")
    add("--python", default=sys.executable, help="interpreter on every host (default: this one)")
    add("--launcher", help="mpirun on every host (default: beside the interpreter, or on PATH)")
    add("--shared", type=Path, help="directory that has to be one on all hosts")
    add("--json", action="store_true", help="print JSON")
    add("--write", choices=("openmpi", "hydra"), help="print the hostfile in a spelling, and end")
    return parser
