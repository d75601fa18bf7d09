"""The learning rate over a run, beside torch's own schedules."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, OneCycleLR

from lockstep.schedules import NAMES, factor, schedule

TOTAL = 200


def rates(made: LRScheduler, optimizer: torch.optim.Optimizer, steps: int = TOTAL) -> list[float]:
    """Return the learning rate of each step."""
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        made.step()
    return found


def sgd(lr: float) -> torch.optim.Optimizer:
    """Return an optimizer of one number."""
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)


def test_cosine_is_torchs() -> None:
    """Without a warm-up, to the last digits."""
    one, other = sgd(0.5), sgd(0.5)
    expected = rates(CosineAnnealingLR(one, TOTAL), one)
    found = rates(schedule(other, "cosine", total=TOTAL), other)
    assert found == pytest.approx(expected, abs=1e-9)


def test_one_cycle_is_torchs_but_for_a_step() -> None:
    """Begin, peak and end are the same; torch counts its steps from another end."""
    one, other = sgd(0.5), sgd(0.5)
    expected = rates(OneCycleLR(one, 0.5, TOTAL, cycle_momentum=False), one)
    found = rates(schedule(other, "onecycle", total=TOTAL), other)
    assert found == pytest.approx(expected, abs=0.5 * 4 / (0.3 * TOTAL))
    assert found[0] == pytest.approx(0.5 / 25)
    assert max(found) == 0.5
    assert found[-1] < 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_warm_up(name: str) -> None:
    """It rises until the given step, is highest there, and never rises again."""
    found = [factor(name, step, TOTAL, 20) for step in range(TOTAL + 5)]
    assert all(a < b for a, b in pairwise(found[:21]))
    assert found[20] == 1.0
    assert all(a >= b for a, b in pairwise(found[20:]))
    assert 0.0 < found[0] < 0.1


def test_goes_on_anywhere() -> None:
    """With the number of steps alone, the rest is that of a run that was not stopped."""
    whole, first, second = sgd(0.1), sgd(0.1), sgd(0.1)
    expected = rates(schedule(whole, "onecycle", total=TOTAL), whole)
    stopped = schedule(first, "onecycle", total=TOTAL)
    rates(stopped, first, 77)
    resumed = schedule(second, "onecycle", total=TOTAL, done=77)
    assert rates(resumed, second, TOTAL - 77) == expected[77:]


def test_unknown() -> None:
    """A name that is none."""
    with pytest.raises(KeyError):
        factor("linear", 0, 10)


def test_short_runs() -> None:
    """One step, and a warm-up longer than the run."""
    for name in NAMES:
        assert 0.0 < factor(name, 0, 1) <= 1.0
        assert 0.0 < factor(name, 3, 4, 100) < 1.0
