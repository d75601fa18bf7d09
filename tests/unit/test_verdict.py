"""From what each rank is doing to one verdict."""

from __future__ import annotations

from lockstep import notes
from lockstep.watchdog.report import UP, RankReport, Standing, is_over
from lockstep.watchdog.verdict import judge


def call(number: int, verb: str = "all_reduce", what: str = "float32[21840]", **more: object):
    """Return a call of the default group, standing for 30 s at train.py:88."""
    values = {"group": "0", "members": "0-7", "place": "train.py:88", "seconds": 30.0, **more}
    return Standing(number=number, verb=verb, what=what, **values)  # type: ignore[arg-type]


def waiting(rank: int, *calls: Standing, **more: object) -> RankReport:
    """Return a rank that stands in a call."""
    return RankReport(rank, f"node{rank // 2}", open=list(calls), **more)  # type: ignore[arg-type]


def test_a_rank_that_has_not_come() -> None:
    """It is named, with the call, and where it is instead."""
    ranks = [waiting(r, call(412)) for r in range(8) if r != 5]
    late = RankReport(5, "node2", place="data.py:40", since=31.4, done=[call(411)])
    verdict = judge([*ranks[:5], late, *ranks[5:]])
    assert verdict.text == (
        "rank 5 (node2) has not entered all_reduce #412 of group 0 (float32[21840], train.py:88); "
        "it is in data.py:40 since 31 s\n7 others wait there."
    )
    assert verdict.late == [5]
    assert not verdict.fatal


def test_another_verb() -> None:
    """Who called what, where the others called what."""
    ranks = [waiting(r, call(17)) for r in range(3)]
    odd = waiting(3, call(17, "broadcast", place="odd.py:3"))
    said = judge([*ranks, odd]).text
    assert said == ("rank 3 called broadcast #17 (odd.py:3) where the others called all_reduce #17")


def test_other_shapes() -> None:
    """Both shapes are said."""
    ranks = [waiting(0, call(3, what="float32[12]")), waiting(2, call(3, what="float32[12]"))]
    odd = waiting(1, call(3, what="float32[10]"))
    said = judge([ranks[0], odd, ranks[1]]).text
    assert said == (
        "shapes differ in all_reduce #3: rank 1 float32[10] (train.py:88), others float32[12]"
    )


def test_a_rank_that_is_gone_and_one_that_is_stopped() -> None:
    """Both are named; that others wait for them too."""
    ranks = [
        waiting(0, call(9)),
        RankReport(1, "node0", "gone", "SIGKILL, signal 9"),
        RankReport(2, "node1", "stopped", place="a.py:1", since=3.0, pid=4711),
    ]
    verdict = judge(ranks)
    lines = verdict.text.splitlines()
    assert lines[0] == "rank 1 (node0) is gone (SIGKILL, signal 9)"
    assert lines[1] == (
        "rank 2 (node1) is stopped (SIGSTOP, Ctrl-Z or a debugger, process 4711); last seen in "
        "a.py:1 since 3 s"
    )
    assert "rank 0 in all_reduce #9" in lines[2]
    assert verdict.fatal


def test_a_host_that_does_not_answer() -> None:
    """Its ranks are named together, with the host."""
    ranks = [waiting(0, call(9)), waiting(1, call(9))]
    silent = [RankReport(r, "node1", "silent") for r in (2, 3)]
    said = judge([*ranks, *silent]).text
    assert said.startswith("rank 2, 3 (node1): no answer from there: is the host cut off?")


def test_a_rank_that_waits_elsewhere() -> None:
    """Two groups that wait for each other."""
    ranks = [waiting(0, call(4)), waiting(1, call(4))]
    other = waiting(2, call(2, "broadcast", group="pair", members="2-3"), done=[call(3)])
    said = judge([*ranks, other]).text
    assert "rank 2 (node1) has not entered all_reduce #4" in said
    assert "it waits in broadcast #2 of group pair" in said


def test_who_waits_elsewhere_is_not_late_if_that_has_a_cause_of_its_own() -> None:
    """Most ranks wait for rank 2; that one waits for rank 3, which is the late one."""
    most = [waiting(r, call(4, members="0-3")) for r in range(2)]
    pair = waiting(2, call(2, group="pair", members="2-3"), done=[call(3, members="0-3")])
    late = RankReport(3, "node1", place="loop.py:4", since=20.0)
    verdict = judge([*most, pair, late])
    assert verdict.blamed == {3}
    assert verdict.text.startswith("rank 3 (node1) has not entered all_reduce #2 of group pair")


def test_two_that_wait_for_each_other() -> None:
    """Neither is to blame more than the other: both calls are said."""
    one = waiting(0, call(30, "sum of gradients", "", group=notes.SUMS, members="", place="a.py:5"))
    other = waiting(1, call(1, members="0-1", place="a.py:9"))
    verdict = judge([one, other])
    assert verdict.text.splitlines() == [
        "rank 0 (node0) waits in sum of gradients #30 of group sgd (a.py:5)",
        "rank 1 (node0) waits in all_reduce #1 of group 0 (float32[21840], a.py:9)",
        "they wait for each other in different calls",
    ]
    assert verdict.late == [0, 1]


def test_who_has_closed_the_session_can_never_come() -> None:
    """So the job has to end; not if he was in the call, or is no member, or it is not known."""
    wait = waiting(0, call(4, members="0-1"))
    for fatal, closed in (
        (True, RankReport(1, "node0", left="closed", done=[call(3, members="0-1")])),
        (True, RankReport(1, "node0", left="closed")),
        (False, RankReport(1, "node0", left="closed", done=[call(4, members="0-1")])),
        (False, RankReport(2, "node0", left="closed")),
        (
            False,
            RankReport(1, "node0", left="closed", done=[call(n, group="1") for n in range(16)]),
        ),
    ):
        late = RankReport(1, "node0", place="a.py:1")
        reports = [wait, closed] if closed.rank == 1 else [wait, late, closed]
        assert judge(reports).fatal == fatal, closed


def test_a_rank_outside_of_the_group_is_not_late() -> None:
    """Members are those that the group has, not all ranks."""
    ranks = [waiting(r, call(4, members="0-1")) for r in range(2)]
    outside = RankReport(2, "node1", place="x.py:1", since=100.0)
    assert judge([*ranks, outside]).late == [0, 1]
    assert "rank 2" not in judge([*ranks, outside]).text


def test_messages() -> None:
    """Who waits for a message from whom, and where that one is."""
    message = call(1, "recv from rank 1, tag 0", group=notes.MESSAGES, members="")
    said = judge([waiting(0, message), RankReport(1, "node0", place="b.py:2", since=5.0)]).text
    assert said.splitlines() == [
        "rank 0 (node0) waits in recv from rank 1, tag 0 (float32[21840], train.py:88) since 30 s",
        "rank 1 (node0) is in b.py:2 since 5 s",
    ]


def test_only_places_are_known() -> None:
    """The odd one is named."""
    ranks = [RankReport(r, "node0", place="a.py:7", since=9.0) for r in range(3)]
    odd = RankReport(3, "node1", place="data.py:40", since=31.0)
    verdict = judge([*ranks, odd])
    assert verdict.text.splitlines() == [
        "rank 3 (node1) is in data.py:40 since 31 s",
        "rank 0, 1, 2 in a.py:7",
    ]
    assert verdict.late == [3]


def test_ranks_that_end_because_of_others_are_not_named() -> None:
    """Those that gave up waiting; and those that a launcher ends after one has died."""
    ranks = [
        RankReport(0, "node0", left=UP),
        RankReport(1, "node0", "gone", "SIGKILL, signal 9", place="a.py:1"),
        RankReport(2, "node1", "gone", "SIGTERM, signal 15"),
    ]
    verdict = judge(ranks)
    assert verdict.text == "rank 1 (node0) is gone (SIGKILL, signal 9); last seen in a.py:1"
    assert verdict.blamed == {1}
    assert judge([ranks[0], ranks[2]]).blamed == {2}  # then it was somebody else
    only = judge([ranks[0], RankReport(1, "node0", "gone", left="closed")])
    assert only.text == "rank 0 gave up waiting for others"
    assert not only.blamed


def test_who_crashes_after_a_verdict_is_not_named() -> None:
    """It does so since others end; who is killed then is."""
    ranks = [
        RankReport(0, "node0", "gone", "SIGSEGV, signal 11"),
        RankReport(1, "node0", place="b.py:2"),
    ]
    assert judge(ranks).blamed == {0}
    assert not judge(ranks, told=frozenset({1})).blamed
    killed = RankReport(0, "node0", "gone", "SIGKILL, signal 9")
    assert judge([killed, ranks[1]], told=frozenset({1})).blamed == {0}


def test_after_a_verdict_calls_tell_nothing_new() -> None:
    """Rank 2 has given up its sum, rank 0 stands in it still; the late one stands elsewhere."""
    reports = [
        waiting(0, call(21, "sum", "", group=notes.SUMS, members="")),
        waiting(1, call(1, members="0-2")),
        RankReport(2, "node1", left=UP),
    ]
    assert not judge(reports, told=frozenset({1})).blamed


def test_a_crash_where_no_call_is_known() -> None:
    """Where the others are may be what has made it crash; they are shown, and not blamed."""
    crash = RankReport(1, "node0", "gone", "SIGABRT, signal 6", place="odd.py:9")
    verdict = judge([RankReport(r, "node0", place="a.py:7") if r != 1 else crash for r in range(3)])
    assert verdict.text.splitlines()[:2] == [
        "rank 1 (node0) is gone (SIGABRT, signal 6); last seen in odd.py:9",
        "rank 0, 2 in a.py:7",
    ]
    assert "LOCKSTEP_CHECK=1" in verdict.text
    assert (verdict.late, verdict.blamed) == ([1], {1})
    innocent = RankReport(0, "node0", "gone", "SIGABRT, signal 6", place="a.py:7")
    odd = RankReport(1, "node0", place="odd.py:9")
    on_its_way = RankReport(2, "node0", place="a.py:5")
    verdict = judge([innocent, odd, on_its_way])
    assert verdict.text.splitlines()[1:3] == ["rank 1 in odd.py:9", "rank 2 in a.py:5"]
    assert verdict.blamed == {0}


def test_gloo_is_suspected_of_its_own_crashes_only() -> None:
    """Not where the calls are known, and not of another signal."""
    crash = RankReport(0, "node0", "gone", "SIGSEGV, signal 11", place="a.py:7")
    assert "gloo" not in judge([crash, RankReport(1, "node0", place="a.py:7")]).text
    crash = RankReport(0, "node0", "gone", "SIGABRT, signal 6", done=[call(1, members="0-1")])
    assert "gloo" not in judge([crash, RankReport(1, "node0", place="a.py:7")]).text


def test_calls_that_differed_and_are_over() -> None:
    """All ranks have left the last call with an error; the odd one is named, with its line."""
    ranks = [RankReport(r, "node0", done=[call(7), call(8)]) for r in range(2)]
    odd = RankReport(2, "node1", done=[call(7), call(8, "broadcast", place="odd.py:3")])
    assert judge([*ranks, odd]).text == (
        "rank 2 called broadcast #8 (odd.py:3) where the others called all_reduce #8"
    )
    later = [RankReport(it.rank, it.host, done=[*it.done, call(9)]) for it in (*ranks, odd)]
    assert "broadcast" not in judge(later).text  # somebody has caught that error


def test_sizes_that_may_differ() -> None:
    """An uneven all_to_all that waits for a rank is no mismatch."""
    uneven = {"verb": "all_to_all_single", "members": "0-2"}
    ranks = [waiting(r, call(4, what=f"float32[{r + 1}]", **uneven)) for r in range(2)]
    assert judge([*ranks, RankReport(2, "node1", place="c.py:1", since=9.0)]).blamed == {2}


def test_the_sums_of_all_ranks_name_one_that_never_came() -> None:
    """Their group has no list of members: it is all ranks."""
    sums = [waiting(r, call(1, "sum", "", group=notes.SUMS, members="")) for r in range(2)]
    other = waiting(2, call(1, members="0-2", place="test.py:3"))
    verdict = judge([*sums, other])
    assert verdict.text.startswith("rank 2 (node1) has not entered sum #1 of group sgd")
    assert "it waits in all_reduce #1 of group 0 (float32[21840], test.py:3)" in verdict.text
    assert verdict.blamed == {2}


def test_of_two_places_that_of_the_waiting_rank_is_right() -> None:
    """Whose call has failed is known; with more ranks the majority decides."""
    two = [RankReport(0, "node0", place="loop.py:4"), RankReport(1, "node0", place="a.py:7")]
    assert judge(two, waits=1).blamed == {0}
    assert judge([*two, RankReport(2, "node1", place="a.py:7")], waits=0).blamed == {0}


def test_a_normal_end_is_no_news() -> None:
    """All have closed their sessions."""
    verdict = judge([RankReport(r, "node0", "gone", left="closed") for r in range(2)])
    assert "closed" not in verdict.text


def test_a_call_that_is_over_is_not_told_of() -> None:
    """The word that it stands has come late."""
    standing = waiting(0, call(9))
    facts = {"group": "0|0-1", "number": 9}
    assert not is_over(facts, [standing, RankReport(1, "node0")])
    assert is_over({**facts, "number": 8}, [standing])
    assert is_over({**facts, "group": "1|0-1"}, [standing])
