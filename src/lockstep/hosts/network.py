"""Do the hosts reach each other: by ssh, by TCP at their names, in the shared directory? Local."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence

from lockstep.hosts.judge import Case, Finding, error_of, failed, misled
from lockstep.hosts.link import kind_of
from lockstep.hosts.survey import Answer
from lockstep.launcher import Family, interface_setting


def login(case: Case) -> list[Finding]:
    """ssh leads from here to every host. Local."""
    found = []
    for it in case.answers:
        if it.trouble is not None and it.trouble.kind not in ("interpreter", "name"):
            found.append(_ssh(it.name, case.here.name, it.name, it.trouble.kind, it.trouble.said))
    return found


def back(case: Case) -> list[Finding]:
    """ssh leads from every host to its neighbours. Local.

    Who is to blame: a host that nobody else could be seen to enter; otherwise the one that tried.
    """
    entered = {it.name for it in case.heard if not it.here}
    tries = [
        (it.name, name, error_of(said) or str(said or ""))
        for it in case.heard
        for key, said in it.met.items()
        if (name := key.removeprefix("ssh ")) != key
    ]
    entered |= {target for _, target, said in tries if not said}
    found = []
    wrong = misled(case)
    for source, target, said in tries:
        kind = kind_of(said)
        if said and (source, target) not in wrong:
            host = source if target in entered else target
            found.append(_ssh(host, source, target, kind, said))
    return found


def _ssh(host: str, source: str, target: str, kind: str, said: str) -> Finding:
    there = f"on {source}: "
    cure = {
        "key": f"{there}ssh-copy-id {target}; then `ssh {target} true` must ask nothing",
        "host key": f"{there}ssh {target}; compare the fingerprint, then answer yes",
        "sshd": f"on {target}: systemctl start ssh (or sshd)",
        "banner": f"on {target}, at its console: systemctl restart ssh (or sshd)",
        "unreachable": f"{there}ping -c 3 {target}; is it switched on, its cable plugged in, "
        "port 22 open in its firewall?",
    }.get(kind, f"{there}ssh -v {target} true")
    what = {
        "key": f"{target} does not let {source} in without a password",
        "host key": f"{source} does not trust the host key of {target}",
        "sshd": f"no sshd answers on {target}, asked from {source}",
        "banner": f"the sshd of {target} takes the connection from {source} and does not answer",
        "unreachable": f"{source} does not reach {target}",
        "silent": f"{target} does not answer {source} in time",
    }.get(kind, f"ssh from {source} to {target} failed")
    return failed(host, "ssh", f"{what}: {said}", cure)


def doors(case: Case) -> list[Finding]:
    """A free port of each host is reached by its neighbours, as MPI and gloo will. Local."""
    tries = [
        (it.name, name, error_of(said) or str(said or ""))
        for it in case.heard
        for key, said in it.met.items()
        if (name := key.removeprefix("door ")) != key
    ]
    reached = {target for _, target, said in tries if not said}
    found = []
    wrong = misled(case)
    for source, target, said in tries:
        if said and (source, target) not in wrong:
            host = source if target in reached else target
            what = f"{source} does not reach a port of {target} at that name: {said}"
            cure = f"on {target}: is there a firewall (nft list ruleset)? MPI needs all ports open"
            found.append(failed(host, "network", f"{what}", f"{cure}; getent hosts {target}"))
    return found


def decoys(case: Case, family: Family) -> list[Finding]:
    """No address is there on several hosts: MPI would look for its peers at it. Local."""
    owners: dict[str, list[tuple[str, str]]] = {}
    # one machine under two names is another fault
    once = {str((it.facts["host"], it.facts["interfaces"])): it for it in case.heard}
    for it in once.values():
        for name, address, _ in it.facts["interfaces"]:
            owners.setdefault(address, []).append((it.name, name))
    right = _right_interface(case)
    typed, value = interface_setting(family)
    found = []
    for address, owned in owners.items():
        if len(owned) < 2:
            continue
        hosts, interface = ", ".join(host for host, _ in owned), owned[0][1]
        what = f"{interface} has the address {address} on {len(owned)} hosts ({hosts})"
        if family == "openmpi":
            what += "; Open MPI connects to it, and fails or is silent"
        elif family == "intel":
            what += "; Intel MPI connects to it, and hangs"
        harmless = not typed or value not in ("", interface)
        cure = (
            typed.format(right)
            if typed
            else f"nothing for this MPI; export GLOO_SOCKET_IFNAME={right}"
        )
        found.append(
            Finding(owned[0][0], "network", "warning" if harmless else "failed", what, cure)
        )
    return found


def _right_interface(case: Case) -> str:
    """Return the interface that has the address of its host's name, as most hosts call it."""
    names: Counter[str] = Counter()
    for it in case.heard:
        addresses = {
            address
            for other in case.heard
            if other is not it
            and not error_of(view := other.facts["names"].get(it.name, {"error": ""}))
            for address in view
        }
        names.update(name for name, address, _ in it.facts["interfaces"] if address in addresses)
    return names.most_common(1)[0][0] if names else "eth0"


def shared(case: Case, verdict: str) -> list[Finding]:
    """The shared directory is one directory: what each wrote, the others have read. Local.

    Args:
        verdict: "failed", or "warning" where nobody asked for the directory.
    """
    directory = shlex.quote(case.plan.shared)
    found: list[Finding] = []
    seen: dict[str, Answer] = {}
    for it in case.heard:
        if error := error_of(it.facts["shared"]) or error_of(it.met.get("shared")):
            what = f"{case.plan.shared} cannot be used on {it.name}: {error}"
            found.append(_not_shared(it.name, verdict, what, directory))
        elif "shared" in it.met:
            seen[it.name] = it
    right = _largest(list(seen.values()))
    for name in seen:
        if name not in right:
            what = (
                f"{case.plan.shared} is another directory on {name} than on {', '.join(right[:4])}"
            )
            found.append(_not_shared(name, verdict, what, directory))
    return found


def _not_shared(host: str, verdict: str, what: str, directory: str) -> Finding:
    cure = f"on {host}: df {directory}; ls -ld {directory}; is the shared file system mounted?"
    return Finding(host, "shared", verdict, what, cure)


def _largest(answers: Sequence[Answer]) -> list[str]:
    """Return the hosts of the largest group that sees each other's files; of equals, the first."""
    number = {int(it.met["number"]): it.name for it in answers}
    groups: list[set[str]] = []
    for it in answers:
        group = {it.name, *(number[i] for i in it.met["shared"]["seen"] if i in number)}
        joined = [other for other in groups if other & group]
        groups = [other for other in groups if not other & group] + [group.union(*joined)]
    order = [it.name for it in answers]
    groups.sort(key=lambda group: (-len(group), min(order.index(name) for name in group)))
    return sorted(groups[0], key=order.index) if groups else []
