"""Checkpoint files: cut, changed, killed, crowded out; that no code is run from one."""

from __future__ import annotations

import os
import pickle
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from disks import small_disk
from lockstep.checkpoint import check_export, container, export
from lockstep.checkpoint.folder import FORMAT, Folder, newest
from lockstep.errors import CheckpointError, StorageError
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
