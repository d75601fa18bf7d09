"""Is the software the same on all hosts: interpreter, packages, MPI, launcher, checkout? Local."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

from lockstep.hosts.judge import Case, Finding, error_of, failed, odd_ones
from lockstep.hosts.survey import Answer


def interpreter(case: Case) -> list[Finding]:
    """The interpreter is there, and of one version. Local."""
    python, found = case.plan.python, []
    for it in case.answers:
        if it.trouble is not None and it.trouble.kind == "interpreter":
            what = f"no interpreter {python} on {it.name}: {it.trouble.said}"
            found.append(failed(it.name, "python", what, _bring(it.name, python)))
    usual, odd = odd_ones(case.heard, lambda it: str(it.facts["python"]), case.here)
    for it, said in odd:
        what = f"{python} is Python {said} on {it.name}, elsewhere {usual}"
        found.append(failed(it.name, "python", what, _bring(it.name, python)))
    return found


def bare(case: Case, carried: bool) -> list[Finding]:
    """The word `python` means the same as here, where the launcher does not carry PATH. Local."""
    here, found = str(case.here.facts.get("bare") or ""), list[Finding]()
    if carried or not here or error_of(here):
        return found
    for it in case.heard:
        there = it.facts["bare"]
        if it.listed and there != here and not error_of(there):
            what = f"mpirun takes no PATH along: `python` is {there or 'not there'} on {it.name}, "
            cure = f"mpirun -x PATH (Open MPI), or {shlex.quote(case.plan.python)} in its place"
            found.append(Finding(it.name, "python", "warning", f"{what}{here} here", cure))
    return found


def packages(case: Case) -> list[Finding]:
    """The packages that ranks compute and talk with have one version each. Local."""
    found = []
    for name in case.plan.packages:

        def version(it: Answer, name: str = name) -> str:
            of_all = it.facts["packages"]
            return error_of(of_all) or str(of_all.get(name) or "missing")

        usual, odd = odd_ones(case.heard, version, case.here)
        for it, said in odd:
            what = f"{name} is {said} on {it.name}, elsewhere {usual}"
            pin = f"{name}=={usual}"
            cure = (
                f"on {it.name}: {shlex.quote(case.plan.python)} -m pip install {shlex.quote(pin)}"
            )
            found.append(failed(it.name, "packages", what, cure))
    return found


def mpi(case: Case) -> list[Finding]:
    """mpi4py loads the same MPI library everywhere, and the launchers are the same. Local."""
    found = []
    plan = case.plan
    subjects = {"mpi": f"the MPI library of {plan.python}"}
    if plan.launcher:
        subjects["launcher"] = plan.launcher
    for key, subject in subjects.items():
        for it in case.heard:
            if error := error_of(it.facts[key]):
                what = f"{subject} does not work on {it.name}: {error}"
                found.append(
                    failed(it.name, "mpi", what, _bring(it.name, plan.launcher or plan.python))
                )
        for part, said_of in (("", _first), (" file", _second)):
            if part and key == "launcher":
                continue
            usual, odd = odd_ones(case.heard, _part(key, said_of), case.here)
            for it, said in odd:
                what = f"{subject} is {said} on {it.name}, elsewhere {usual}"
                cure = f"one environment for all hosts, or the same version on {it.name}: "
                cure += f"{shlex.quote(plan.python)} -m pip list | grep -i mpi"
                found.append(failed(it.name, "mpi", what, cure))
    return found


def checkout(case: Case) -> list[Finding]:
    """The checkout is the same everywhere, and the working directory is there. Local."""
    plan, found = case.plan, list[Finding]()
    if not plan.checkout:
        return found
    here = shlex.quote(plan.checkout)
    for it in case.heard:
        said = it.facts["checkout"]
        if not said or error_of(said):
            what = f"no checkout {plan.checkout} on {it.name}{_because(said)}"
            found.append(failed(it.name, "checkout", what, f"on {it.name}: ls {here}; df {here}"))
        there = it.facts["directory"]
        if it.listed and there is not True and plan.directory != plan.checkout:
            what = f"no working directory {plan.directory} on {it.name}{_because(there)}"
            cure = (
                f"on {it.name}: mkdir -p {shlex.quote(plan.directory)}; or start from another one"
            )
            found.append(failed(it.name, "checkout", what, cure))

    def number(it: Answer) -> str:
        return "" if error_of(it.facts["checkout"]) else str(it.facts["checkout"])

    usual, odd = odd_ones(case.heard, number, case.here)
    for it, said in odd:
        what = f"the files of {plan.checkout} are others on {it.name} ({said}, elsewhere {usual})"
        cure = (
            f"on {it.name} and here: git -C {here} log -1 --oneline; git -C {here} status --short"
        )
        found.append(failed(it.name, "checkout", what, cure))
    return found


def _because(said: Any) -> str:
    return f": {error}" if (error := error_of(said)) else ""


def _first(lines: list[str]) -> str:
    return lines[0] if lines else ""


def _second(lines: list[str]) -> str:
    return lines[1] if len(lines) > 1 else ""


def _part(key: str, which: Callable[[list[str]], str]) -> Callable[[Answer], str]:
    return lambda it: "" if error_of(it.facts[key]) else which(it.facts[key])


def _bring(host: str, path: str) -> str:
    path = shlex.quote(path)
    return (
        f"on {host}: ls -l {path}; share it with all hosts, or `make setup` in the checkout there"
    )
