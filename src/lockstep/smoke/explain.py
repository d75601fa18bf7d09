"""Say what has become of a check, also where ranks did not answer, hung or failed. Local."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.smoke import processes
from lockstep.smoke.check import Check, Finding, Lab
from lockstep.smoke.compare import named
from lockstep.smoke.hands import Answer


def explain(
    check: Check, answers: Mapping[int, Answer], lost: Mapping[int, str], limit: float, lab: Lab
) -> Finding:
    """Return the verdict on a check.

    Args:
        check: its own judgement counts where there is something to judge.
        answers: by rank, of the ranks that have answered.
        lost: the ranks that do not answer, and what is known about each.
        limit: seconds that the check had.
        lab: its roster names the ranks.
    """
    good = {rank: answer.value for rank, answer in answers.items() if answer.good}
    whole = not check.together or len(good) == lab.world.size
    finding = _judged(check, good, lab) if good and whole else Finding()
    hung = {rank: answer.hung for rank, answer in answers.items() if answer.hung}
    _name_lost(finding, lost, lab)
    # Where ranks are lost, the others wait for them: that is no news.
    if not (lost and check.together):
        _name_hung(finding, hung, limit, lab)
    _name_troubled(finding, answers, lab)
    if not finding.summary and finding.faults:
        first = finding.faults[0].found
        finding.summary = first if len(first) < 90 else first[:87] + "…"
    return finding


def _judged(check: Check, good: Mapping[int, object], lab: Lab) -> Finding:
    return check.judge(good, lab)


def _name_lost(finding: Finding, lost: Mapping[int, str], lab: Lab) -> None:
    for rank, state in sorted(lost.items()):
        it = lab.roster.get(rank)
        if it is None:
            finding.fail(
                f"rank {rank} does not answer: {state}",
                "look at what that rank prints; `mpirun -np N hostname` shows where ranks go",
            )
            continue
        known = state if not state.startswith("has not") else ""
        finding.fail(f"{it} does not answer: it {state}", processes.cure(it.host, it.pid, known))


def _name_hung(finding: Finding, hung: Mapping[int, str], limit: float, lab: Lab) -> None:
    places: dict[str, list[int]] = {}
    for rank, place in hung.items():
        places.setdefault(place, []).append(rank)
    for place, ranks in places.items():
        word = "has" if len(ranks) == 1 else "have"
        first = lab.roster[ranks[0]]
        finding.fail(
            f"{named(ranks, lab.roster)} {word} not come back within {limit:.3g} s from {place}",
            f"ssh {first.host} py-spy dump --pid {first.pid}   # while it hangs; "
            "is that host very busy, or are its files slow?",
        )


def _name_troubled(finding: Finding, answers: Mapping[int, Answer], lab: Lab) -> None:
    kinds: dict[tuple[str, str], list[int]] = {}
    for rank, answer in answers.items():
        if answer.trouble:
            kinds.setdefault((answer.trouble, answer.cure), []).append(rank)
    for (trouble, cure), ranks in kinds.items():
        # A failure that all agreed on names its ranks itself.
        who = "" if len(ranks) == lab.world.size else f"{named(ranks, lab.roster)}: "
        finding.fail(who + trouble, cure)
