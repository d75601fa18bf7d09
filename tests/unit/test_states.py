"""What a checkpoint may hold: random states, models, optimizers; and what is exported."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lockstep.checkpoint import check_export, export, load_model, load_optimizer
from lockstep.checkpoint.random_state import random_state, restore_random, seed_for
from lockstep.checkpoint.state import copied
from lockstep.errors import CheckpointError, LockstepError, StorageError


def test_what_a_state_may_hold() -> None:
    """Copies of tensors and plain values; anything else is refused by its name."""
    tensor = torch.arange(6.0).view(2, 3)[:, 1]
    state = {"a": [tensor, (1, None)], 3: {"path": Path("x"), "n": np.float64(2.5)}}
    kept = copied(state)
    tensor.zero_()
    assert kept["a"][0].tolist() == [1.0, 4.0]
    assert kept["a"][0].untyped_storage().nbytes() == 8
    assert kept["a"][1] == (1, None)
    assert kept[3] == {"path": "x", "n": 2.5}
    with pytest.raises(CheckpointError, match=r"state\.a\[1\]\.f is of type function"):
        copied({"a": [0, {"f": copied}]})


def test_random_states_come_back() -> None:
    """torch, numpy and Python; numpy's kept normal number and Python's too."""

    def draw() -> list[float]:
        return [
            *torch.rand(2).tolist(),
            *np.random.randn(3).tolist(),
            random.random(),
            random.gauss(0, 1),
        ]

    np.random.randn()
    random.gauss(0, 1)
    state = random_state()
    first = draw()
    draw()
    restore_random(state)
    assert draw() == first


def test_ranks_without_a_state() -> None:
    """Each starts at a number of its own, the same each time."""
    root = random_state()
    seeds = [seed_for(rank, root) for rank in range(1, 50)]
    assert len({seed["seed"] for seed in seeds}) == 49
    assert seeds == [seed_for(rank, root) for rank in range(1, 50)]
    restore_random(seeds[0])
    first = torch.rand(3), np.random.rand(), random.random()
    restore_random(seeds[0])
    assert torch.equal(torch.rand(3), first[0])
    assert (np.random.rand(), random.random()) == first[1:]
    assert seed_for(1, seeds[0]) != seed_for(2, seeds[0])


def test_another_model(tmp_path: Path) -> None:
    """The first that differs is named, with both shapes; the model is as it was."""
    saved = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).state_dict()
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(CheckpointError, match=r"1\.weight is float32 \[2, 4\] .* \[5, 4\]"):
        load_model(model, saved)
    with pytest.raises(CheckpointError, match=r"1\.weight is missing in the checkpoint"):
        load_model(model, {k: v for k, v in model.state_dict().items() if k[0] == "0"})
    with pytest.raises(CheckpointError, match=r"extra is float32 \[1\] .* missing in this model"):
        load_model(model, {**model.state_dict(), "extra": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=r"0\.weight is float64"):
        load_model(model, {k: v.double() for k, v in model.state_dict().items()})
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("other", [torch.optim.SGD, torch.optim.AdamW])
def test_another_optimizer(other: Any) -> None:
    """Adam's state is not SGD's, nor AdamW's; a schedule makes no difference."""
    model = nn.Linear(2, 2)
    adam = torch.optim.Adam(model.parameters())
    saved = adam.state_dict()
    torch.optim.lr_scheduler.OneCycleLR(adam, 0.1, total_steps=5)
    load_optimizer(adam, saved)
    with pytest.raises(CheckpointError, match="another optimizer"):
        load_optimizer(other(model.parameters(), lr=0.1), saved)
    with pytest.raises(CheckpointError, match=r"2 parameters with .*1 parameters with"):
        load_optimizer(torch.optim.Adam([model.weight]), saved)


def test_export(tmp_path: Path) -> None:
    """Others can read it; a file that is not ours is left alone."""
    from safetensors.torch import load_file

    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)).to(
        memory_format=torch.channels_last
    )
    path = tmp_path / "model.safetensors"
    check_export(path)
    export(model, path)
    found = load_file(path)
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(found[name], it) for name, it in model.state_dict().items())
    first = path.read_bytes()
    for _ in range(8):
        export(model, path)
        assert path.read_bytes() == first
    assert [it.name for it in tmp_path.iterdir()] == [path.name]
    path.write_text("mine")
    with pytest.raises(StorageError, match="no export of Lockstep"):
        export(model, path)
    assert path.read_text() == "mine"
    with pytest.raises(LockstepError, match="mkdir -p"):
        check_export(tmp_path / "missing" / "model.safetensors")
