"""Where a run goes on, on as many ranks and on others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from lockstep import World
from lockstep.course import Course, begin_or_go_on, differences, draw, kept, restore
from lockstep.errors import CheckpointError

IMAGES = 1000


def ranks(size: int) -> World:
    """Return the root of a world of so many ranks; nothing here communicates."""
    from mpi4py import MPI

    return World(0, size, 0, size, 0, 1, "here", MPI.COMM_NULL)


@dataclass(frozen=True)
class Given:
    """Settings of a job."""

    share: int = 8
    lr: float = 0.1
    new: int = 1
    end: int = 10**6

    def total_steps(self, an_epoch: int) -> int:
        """Return the steps of the run."""
        return min(self.end, 100 * an_epoch)


def state(**changed: Any) -> dict[str, Any]:
    """Return what a run on 4 ranks has saved after 7 of its 32 steps of epoch 3."""
    kept: dict[str, Any] = {
        "epoch": 3,
        "step": 7,
        "global_step": 71,
        "global_batch": 32,
        "share": 8,
    }
    kept |= {"own": {"sums": [1.5, 2.0]}, "seconds": 9.0, "source": "x"}
    settings = {"share": 8, "lr": 0.1}
    return {**kept, "images": IMAGES, "ranks": 4, "settings": settings, **changed}


def go_on(saved: dict[str, Any] | None, size: int, share: int = 8) -> tuple[Course, list[str]]:
    """Return the course, and the remarks on the numbers of images."""
    found = begin_or_go_on(saved, Given(share=share), IMAGES, ranks(size))
    remarks = [line for line in found.remarks if "from x" not in line and "other set" not in line]
    if saved is not None:
        assert found.seconds == saved["seconds"]
        assert found.start(found.epoch) == (found.done, [1.5, 2.0])
        assert found.start(found.epoch + 1) == (0, None)
    return replace(found, sums=None, seconds=0.0, remarks=()), remarks


def test_begin() -> None:
    """Nothing is done, nothing is said."""
    assert go_on(None, 4) == (Course(8, 32), [])


def test_as_many_ranks() -> None:
    """At the very step."""
    course, said = go_on(state(), 4)
    assert course == Course(8, 32, 3, 7, 71)
    assert [course.last(total) for total in (1, 32, 33, 96)] == [1, 1, 2, 3]
    assert not said


@pytest.mark.parametrize(("size", "share"), [(1, 32), (2, 16), (8, 4), (32, 1)])
def test_other_ranks_keep_the_batch(size: int, share: int) -> None:
    """The same steps, shared out anew; a line says so."""
    course, said = go_on(state(), size)
    assert course == Course(share, 32, 3, 7, 71)
    assert len(said) == 1
    assert "as before" in said[0]


def test_back_again() -> None:
    """The batch is kept from checkpoint to checkpoint, not the share of the ranks between."""
    course, _ = go_on(state(ranks=2), 4)
    assert course == Course(8, 32, 3, 7, 71)


def test_the_batch_cannot_be_kept() -> None:
    """On 3 ranks a step takes 24 images: 9 of these hold 216 of the 224 images seen."""
    course, said = go_on(state(), 3)
    assert course == Course(8, 42, 3, 9, 2 * 42 + 9)
    assert "before 32" in said[1]
    assert "8 images are seen again" in said[1]


def test_another_batch_was_asked_for() -> None:
    """It is taken, and said; an epoch that was done stays so."""
    course, said = go_on(state(), 4, share=16)
    assert course == Course(16, 16, 3, 3, 35)
    assert len(said) == 1
    course, _ = go_on(state(step=32, global_step=96), 4, share=16)
    assert course == Course(16, 16, 3, 16, 48)


def test_another_set() -> None:
    """An error that names both numbers."""
    with pytest.raises(CheckpointError, match="999 images, this one has 1000"):
        go_on(state(images=999), 4)


@pytest.mark.parametrize("name", ["images", "global_batch", "settings", "global_step"])
def test_of_another_kind_of_job(name: str) -> None:
    """What is not there is named."""
    with pytest.raises(CheckpointError, match=f"x lacks {name}"):
        go_on({key: value for key, value in state().items() if key != name}, 4)
    with pytest.raises(CheckpointError, match="lacks model, optimizer"):
        restore(torch.nn.Linear(1, 1), torch.optim.SGD([torch.zeros(1)]), state(random={}))


def test_behind_the_end() -> None:
    """A run that is to be shorter than it is already; at its very end it can still be tested."""
    assert begin_or_go_on(state(), Given(end=71), IMAGES, ranks(4)).total_done == 71
    with pytest.raises(CheckpointError, match=r"x is of step 71, .* to end with step 70"):
        begin_or_go_on(state(), Given(end=70), IMAGES, ranks(4))


def test_what_is_kept() -> None:
    """It is what `begin_or_go_on` looks for, together with the place."""
    course = Course(8, 32, 3, 7, 71)
    place: dict[str, Any] = {
        "epoch": 3,
        "step": 7,
        "global_step": 71,
        "source": "x",
        "seconds": 0.0,
    }
    place["own"] = {"sums": [1.5, 2.0]}
    assert go_on(place | kept(course, Given(), IMAGES, ranks(4)), 4) == (course, [])


def test_differences() -> None:
    """By name, with both values; a setting that the checkpoint does not know is none."""
    saved = {"settings": {"lr": 0.1, "share": 8}}
    assert differences(saved, Given()) == ""
    assert differences(saved, Given(lr=0.2)) == "lr 0.1 -> 0.2"
    course = begin_or_go_on(state(), Given(lr=0.2), IMAGES, ranks(4))
    assert course.remarks == (
        "resume: from x",
        "resume: other settings than then: lr 0.1 -> 0.2",
    )


def test_draw() -> None:
    """The same for the same three numbers, another for any other."""
    triples = [(s, r, n) for s in (0, 1, 2) for r in range(3) for n in (0, 1, 2, 10**6)]
    drawn = [torch.rand(4, generator=draw(*triple)) for triple in triples]
    again = [torch.rand(4, generator=draw(*triple)) for triple in triples]
    assert all(torch.equal(a, b) for a, b in zip(drawn, again, strict=True))
    assert len({tuple(values.tolist()) for values in drawn}) == len(triples)
