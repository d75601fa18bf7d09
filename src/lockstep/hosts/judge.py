"""What the hosts' answers mean: faults by host, each with a cure that can be typed. Local."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median_high, median_low
from typing import Any

from lockstep.hosts.survey import Answer, Plan

CHECKS = (
    *("name", "ssh", "user", "python", "packages", "mpi"),
    *("checkout", "clock", "network", "shared"),
)


@dataclass(frozen=True)
class Finding:
    """A fault.

    Attributes:
        host: where it is.
        check: which of `CHECKS` found it.
        verdict: "failed", or "warning" where a launch may go well all the same.
        found: what was seen.
        cure: one or two lines that can be typed.
    """

    host: str
    check: str
    verdict: str
    found: str
    cure: str


@dataclass(frozen=True)
class Case:
    """All that is judged: the plan and the answers to it."""

    plan: Plan
    answers: Sequence[Answer]

    @property
    def heard(self) -> list[Answer]:
        """The hosts that have told their facts."""
        return [it for it in self.answers if it.facts]

    @property
    def here(self) -> Answer:
        """The machine that asks."""
        return next(it for it in self.answers if it.here)

    @property
    def alone(self) -> bool:
        """Whether no other host takes part, so that names need not lead anywhere."""
        return all(it.here for it in self.answers)


def failed(host: str, check: str, found: str, cure: str) -> Finding:
    """Return a finding that will break a launch."""
    return Finding(host, check, "failed", found, cure)


def error_of(value: Any) -> str:
    """Return what went wrong with a question, "" if it was answered. Local."""
    return str(value["error"]) if isinstance(value, dict) and set(value) == {"error"} else ""


def odd_ones(
    answers: Sequence[Answer], value: Callable[[Answer], str], here: Answer
) -> tuple[str, list[tuple[Answer, str]]]:
    """Return what most hosts say (of two, what this machine says), and who says otherwise. Local.

    Args:
        answers: the hosts.
        value: what one of them says; "" is no vote and never odd.
    """
    votes = Counter(said for answer in answers if (said := value(answer)))
    if not votes:
        return "", []
    most = max(votes.values())
    mine = value(here)
    usual = mine if votes.get(mine, 0) == most else max(votes, key=lambda it: votes[it])
    return usual, [(it, said) for it in answers if (said := value(it)) and said != usual]


def names(case: Case) -> list[Finding]:
    """Each name resolves, on every host, to one address that is not 127.x. Local."""
    found: list[Finding] = []
    if case.alone:
        return found
    for name in case.plan.names:
        views = {it.name: it.facts["names"][name] for it in case.heard}
        if all(error_of(view) for view in views.values()):
            what = f"the name {name} does not resolve on any host"
            cure = (
                f"correct it in the hostfile; or on every host: echo 'ADDRESS {name}' >>/etc/hosts"
            )
            found.append(failed(name, "name", what, cure))
            continue
        usual = _usual(list(views.values()), case.here.facts["names"][name])
        for host, view in views.items():
            found += _view(name, host, view, usual)
    return found + _own_names(case)


def misled(case: Case) -> set[tuple[str, str]]:
    """Return each host that sees another address under a name than most, with the name. Local."""
    wrong = set()
    for name in case.plan.names:
        usual = _usual(
            [it.facts["names"][name] for it in case.heard], case.here.facts["names"][name]
        )
        for it in case.heard:
            view = it.facts["names"][name]
            if error_of(view) or tuple(sorted(view)) != usual:
                wrong.add((it.name, name))
    return wrong


def _usual(views: Sequence[Any], mine: Any) -> tuple[str, ...]:
    """Return the addresses that most hosts see; where it is a draw, what this machine sees."""
    good = Counter(tuple(sorted(it)) for it in views if not error_of(it) and not _loops(it))
    most = [it for it in good if good[it] == max(good.values())]
    own = () if error_of(mine) else tuple(sorted(mine))
    return own if own in most else next(iter(most), ())


# Names that mean the host itself, on every host.
_LOCAL = ("localhost", "localhost.localdomain", "ip6-localhost")


def _view(name: str, host: str, view: Any, usual: Sequence[str]) -> list[Finding]:
    """Judge how one host sees one name."""
    line = f"echo '{usual[0] if usual else 'ADDRESS'} {name}' >>/etc/hosts"
    if error := error_of(view):
        what = f"the name {name} does not resolve on {host}: {error}"
        return [failed(host, "name", what, f"on {host}, or in the name server: {line}")]
    if loop := _loops(view):
        what = f"the name {name} means {loop} on {host}: there, it leads to the host itself"
        if name in _LOCAL:
            cure = f"write the host's own name in place of {name}: elsewhere it is another host"
            return [failed(host, "name", what, cure)]
        # the name alone: localhost may stand in the same line
        at, word = (text.replace(".", "[.]") for text in (loop, name))
        word = rf"[[:space:]]{word}\([[:space:]]\|$\)"
        cure = f"on {host}: sed -i '/^{at}[[:space:]]/s/{word}/ /g' /etc/hosts"
        return [failed(host, "name", what, cure if usual else f"{cure}; {line}")]
    if tuple(sorted(view)) != tuple(usual):
        what = f"the name {name} means {', '.join(view)} on {host}, elsewhere {', '.join(usual)}"
        return [
            failed(host, "name", what, f"on {host}: getent hosts {name}; grep {name} /etc/hosts")
        ]
    return []


def _own_names(case: Case) -> list[Finding]:
    """A host's own name counts too where the hostfile has another one for it: gloo looks it up."""
    found = []
    for it in case.heard:
        own, view = str(it.facts["host"]), it.facts["own"]
        if not it.listed or own in case.plan.names:
            continue
        if loop := ("no address" if error_of(view) else _loops(view)):
            what = f"{it.name} calls itself {own}, and that means {loop} there: gloo cannot use it"
            cure = f"on {it.name}: let {own} mean its address in /etc/hosts"
            found.append(Finding(it.name, "name", "warning", what, cure))
    return found


def _loops(view: Any) -> str:
    """Return the first address that means the host itself, "" if there is none."""
    if error_of(view):
        return ""
    return next((it for it in view if ipaddress.ip_address(it).is_loopback), "")


def machines(case: Case) -> list[Finding]:
    """No machine is there under two names. Local."""
    found: list[Finding] = []
    seen: dict[str, str] = {}
    for it in case.heard:
        key = str((it.facts["host"], it.facts["interfaces"]))
        if it.listed and key in seen:
            what = (
                f"{it.name} and {seen[key]} are one machine, which calls itself {it.facts['host']}"
            )
            found.append(failed(it.name, "name", what, f"getent hosts {it.name} {seen[key]}"))
        seen.setdefault(key, it.name)
    return found


def user(case: Case) -> list[Finding]:
    """One user, with one number, on every host. Local."""

    def who(it: Answer) -> str:
        return f"{it.login[1]} (uid {it.login[0]})" if len(it.login) == 3 else ""

    usual, odd = odd_ones(case.answers, who, case.here)
    cure = (
        "the same account on all hosts: `getent passwd USER` there and here; or `User` for it in "
    )
    return [
        failed(
            it.name,
            "user",
            f"ssh to {it.name} logs in as {said}, elsewhere {usual}",
            f"{cure}~/.ssh/config",
        )
        for it, said in odd
    ]


def clock(case: Case) -> list[Finding]:
    """All clocks within a second. Local."""
    ahead = {it.name: it.ahead for it in case.heard}
    offsets = [offset for offset, _ in ahead.values()] or [0.0]
    # of two, ours is the right one
    middle = min(median_low(offsets), median_high(offsets), key=abs)
    found = []
    for name, (offset, unsure) in ahead.items():
        if abs(offset - middle) - unsure > 1.0:
            way = "ahead of" if offset > middle else "behind"
            what = f"the clock of {name} is {abs(offset - middle):.0f} s {way} the others"
            found.append(
                failed(
                    name, "clock", what, f"on {name}: timedatectl set-ntp true; or chronyc makestep"
                )
            )
    return found
