"""Checkpoint files: cut, changed, killed, crowded out; what they may hold; that no code is run."""

from __future__ import annotations

import os
import pickle
import random
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from disks import small_disk
from lockstep.checkpoint import check_export, container, export, load_model, load_optimizer
from lockstep.checkpoint.folder import FORMAT, Folder, newest
from lockstep.checkpoint.random_state import random_state, restore_random, seed_for
from lockstep.checkpoint.state import copied
from lockstep.errors import CheckpointError, LockstepError, StorageError
from lockstep.waiting import wait_until


def content(step: int, size: int = 3) -> dict[str, Any]:
    """Return a small content, told apart by its step."""
    return {"format": FORMAT, "step": step, "state": {"w": torch.full((size,), float(step))}}


@pytest.fixture
def folder(tmp_path: Path) -> Any:
    """Return a folder of checkpoints that keeps two."""
    one = Folder(tmp_path / "checkpoints", keep=2)
    yield one
    one.lock.release()


def test_a_cut_at_any_byte_is_passed_over(
    folder: Folder, capfd: pytest.CaptureFixture[str]
) -> None:
    """The one before is found, and a line names the file that is not whole."""
    folder.write(1, content(1))
    last = folder.write(2, content(2))
    whole = last.read_bytes()
    assert newest(folder.path)[0].content["step"] == 2  # type: ignore[union-attr]
    capfd.readouterr()
    for length in range(len(whole)):
        last.write_bytes(whole[:length])
        found, damaged = newest(folder.path)
        assert found is not None
        assert found.content["step"] == 1, f"cut after {length} bytes"
        assert damaged == {last}
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == len(whole)
    assert all(f"passed over: {last}" in line for line in lines)


def test_a_change_of_any_byte_is_passed_over(folder: Folder) -> None:
    """In the data, in the mark, in the length, in the digest."""
    folder.write(1, content(1))
    last = folder.write(2, content(2))
    whole = last.read_bytes()
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1 << (place % 8)
        last.write_bytes(changed)
        found, _ = newest(folder.path)
        assert found is not None
        assert found.content["step"] == 1, f"byte {place} of {len(whole)}"
    last.write_bytes(whole + b"\0")
    assert newest(folder.path)[1] == {last}


def test_what_is_no_file_is_passed_over(folder: Folder) -> None:
    """A pipe, at which a reader would wait for ever, and a directory; an export refuses them."""
    folder.write(1, content(1))
    os.mkfifo(pipe := folder.path / "checkpoint-000008-step-8.pt")
    (other := folder.path / "checkpoint-000009-step-9.pt").mkdir()
    found, damaged = newest(folder.path)
    assert found is not None
    assert found.content["step"] == 1
    assert damaged == {pipe, other}
    for name in (pipe, other):
        with pytest.raises(StorageError, match="is there already"):
            check_export(name)


def test_all_are_damaged(folder: Folder) -> None:
    """To start anew in silence would throw work away: an error that says how to."""
    folder.write(1, content(1)).write_bytes(b"")
    with pytest.raises(CheckpointError, match="--resume none"):
        folder.newest()


def test_the_last_few_are_kept(folder: Folder) -> None:
    """Two of five; readable by their owner only; none of the names that are used while writing."""
    for step in range(5):
        folder.write(step, content(step))
    assert [saved.step for saved in folder.saved()] == [3, 4]
    assert {path.name for path in folder.path.iterdir()} == {
        ".lock",
        "checkpoint-000004-step-3.pt",
        "checkpoint-000005-step-4.pt",
    }
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.path.iterdir()} == {0o600}
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700


def test_the_newest_is_the_last_saved(folder: Folder) -> None:
    """Not that of the latest step: a run may have been resumed at an earlier one."""
    folder.write(900, content(900))
    folder.write(100, content(100))
    found = folder.newest()
    assert found is not None
    assert found.content["step"] == 100


def test_damaged_ones_do_not_push_out_valid_ones(folder: Folder) -> None:
    """They do not count among those that are kept."""
    folder.write(1, content(1))
    folder.write(2, content(2)).write_bytes(b"x")
    assert folder.newest().content["step"] == 1  # type: ignore[union-attr]
    folder.write(3, content(3))
    assert [saved.step for saved in folder.saved()] == [1, 2, 3]
    folder.write(4, content(4))
    assert [saved.step for saved in folder.saved()] == [3, 4]


WRITER = """
import sys, torch
from pathlib import Path
from lockstep.checkpoint.folder import FORMAT, Folder
folder = Folder(Path(sys.argv[1]), keep=2)
for step in range(10_000):
    state = {"w": torch.full((2_000_000,), float(step))}
    folder.write(step, {"format": FORMAT, "step": step, "state": state})
    print(step, flush=True)
"""


def parts(directory: Path) -> list[str]:
    """Return the files that are being written, or were when their writer was killed."""
    return [path.name for path in directory.iterdir() if path.name.endswith(".part")]


def test_the_writer_is_killed(tmp_path: Path) -> None:
    """SIGKILL in the middle of a write: what was reported as written is there, whole."""
    left = 0
    for before in range(1, 5):
        command = [sys.executable, "-c", WRITER, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            printed = [int(process.stdout.readline()) for _ in range(before)]
            assert wait_until(lambda: bool(parts(tmp_path)), 30.0)
            process.kill()
            printed += map(int, process.stdout.read().split())
            assert process.wait(30) == -9
        left += len(parts(tmp_path))
        found, damaged = newest(tmp_path)
        assert found is not None
        assert not damaged
        step = found.content["step"]
        assert printed[-1] <= step <= printed[-1] + 1
        assert torch.equal(found.content["state"]["w"], torch.full((2_000_000,), float(step)))
    assert left, "no writer was killed in the middle of a write"
    folder = Folder(tmp_path, keep=2)
    assert not parts(tmp_path)
    folder.lock.release()


def test_only_what_killed_writers_left_is_cleaned_up(tmp_path: Path) -> None:
    """Not what merely looks like it, nor a link; and nothing while another job is at work."""
    ours = tmp_path / f".checkpoint-000007-step-9.pt.{'0a' * 8}.part"
    others = [tmp_path / ".mine.part", tmp_path / "notes.part", tmp_path / "a.pt"]
    link = tmp_path / f".x.{'0b' * 8}.part"
    for path in (ours, *others):
        path.write_text("x")
    link.symlink_to(others[0])
    folder = Folder(tmp_path, keep=1)
    assert not ours.exists()
    assert all(path.exists() for path in others)
    assert link.is_symlink()
    ours.write_text("of a writer at work")
    with pytest.raises(StorageError, match=f"process {os.getpid()} on .*job local"):
        Folder(tmp_path, keep=1)
    assert ours.exists()
    folder.lock.release()
    Folder(tmp_path, keep=1).lock.release()


def test_a_full_disk(tmp_path: Path) -> None:
    """The error names the disk; the older checkpoints stay; nothing half is left."""
    with small_disk(tmp_path / "disk", 1024) as disk:
        folder = Folder(disk / "c", keep=1)
        folder.write(1, content(1, 100_000))
        with pytest.raises(StorageError, match=r"No space left(.|\n)*df -h"):
            folder.write(2, content(2, 200_000))
        assert [saved.path.name for saved in folder.saved()] == ["checkpoint-000001-step-1.pt"]
        assert not parts(folder.path)
        assert folder.newest().content["step"] == 1  # type: ignore[union-attr]
        model = nn.Linear(300, 700)
        with pytest.raises(StorageError, match="No space left"):
            export(model, disk / "model.safetensors")
        assert not (disk / "model.safetensors").exists()
        folder.lock.release()


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_no_code_is_run_from_a_file(tmp_path: Path) -> None:
    """A file with the right digest whose pickle calls a function is refused."""
    target = tmp_path / "made"
    pickle.loads(pickle.dumps(Evil(target)))
    assert target.is_dir()
    target.rmdir()
    path = tmp_path / "checkpoint-000001-step-1.pt"
    with path.open("wb") as file:
        container.write(file, {"format": FORMAT, "evil": Evil(target)})
    with pytest.raises(container.Damaged, match="cannot be decoded"):
        container.decode(container.read(path), "file")
    assert not target.exists()


def test_torch_opens_it(folder: Folder) -> None:
    """By itself, though the digest stands at the end."""
    path = folder.write(1, content(1))
    assert torch.load(path, weights_only=True)["state"]["w"].tolist() == [1.0] * 3


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
