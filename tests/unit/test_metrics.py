"""What a run notes down over its restarts, the picture it draws, the bar it shows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from disks import small_disk
from lockstep.metrics import current, draw, git_id, read
from lockstep.metrics.records import Appender, epochs
from lockstep.progress import Progress, terminal_width

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_git_id(tmp_path: Path) -> None:
    """Read from HEAD, from the branch it names, or from the packed ones; from a folder below."""
    below = tmp_path / "jobs"
    below.mkdir()
    assert git_id(below) is None or not str(git_id(below)).startswith("0123")
    git = tmp_path / ".git"
    (git / "refs" / "heads").mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    assert git_id(below) is None
    (git / "packed-refs").write_text(f"# pack-refs\n{COMMIT} refs/heads/main\n")
    assert git_id(below) == COMMIT
    (git / "refs" / "heads" / "main").write_text(COMMIT[::-1] + "\n")
    assert git_id(below) == COMMIT[::-1]
    (git / "HEAD").write_text(COMMIT + "\n")
    assert git_id(below) == COMMIT


def test_curves(tmp_path: Path) -> None:
    """A picture, of one epoch too."""
    row = {"epoch": 1, "train_loss": 1.0, "test_loss": 0.5, "accuracy": 90.0}
    draw([row], tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("names", [("loss", "acc"), ("train_loss", "accuracy")])
def test_curves_of_either_spelling(tmp_path: Path, names: tuple[str, str]) -> None:
    """More curves make another picture; also where no epoch is done, from the steps."""
    loss, accuracy = names
    row: dict[str, Any] = {"epoch": 1, loss: 1.0, accuracy: 90.0}
    pictures = []
    for rows, steps in (
        ([], []),
        ([row], []),
        ([{**row, "images_per_second": 9.0}], []),
        ([], [{"global_step": 5, "loss": 1.0, "images_per_second": 9.0}]),
    ):
        draw(rows, tmp_path / "curves.png", steps)
        pictures.append((tmp_path / "curves.png").read_bytes())
    assert len(set(pictures)) == 4


def write(path: Path, *records: dict[str, Any]) -> None:
    """Append records as one start of a run."""
    file = Appender(path)
    for record in records:
        file.append(record)
    file.close()


def step(global_step: int, **more: Any) -> dict[str, Any]:
    """Return the record of a step."""
    return {"kind": "step", "global_step": global_step, **more}


def test_a_line_that_a_kill_has_cut_off(tmp_path: Path) -> None:
    """At any byte: it is left alone, all others are read, and later ones are not glued to it."""
    path = tmp_path / "metrics.jsonl"
    write(path, step(1), step(2))
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for length in range(first, len(whole)):
        path.write_bytes(whole[:length])
        write(path, step(3))
        found = [record["global_step"] for record in read(path)]
        # without its end of line alone the second record is whole
        assert found == ([1, 2, 3] if length == len(whole) - 1 else [1, 3]), length
        assert path.read_bytes().startswith(whole[:length])


def test_what_was_done_again_is_superseded(tmp_path: Path) -> None:
    """Steps and epochs after the checkpoint that was resumed; nothing is taken out of the file."""
    path = tmp_path / "metrics.jsonl"
    first = {"kind": "epoch", "epoch": 1, "global_step": 4, "loss": 1.0}
    write(path, step(2), step(4), first, step(6), {"kind": "note"})
    write(path, {"kind": "start", "global_step": 3}, step(4, again=True))
    assert [it.get("global_step") for it in current(read(path)) if it["kind"] != "start"] == [
        2,
        None,
        4,
    ]
    assert len(read(path)) == 7
    write(path, {**first, "loss": 0.5}, {**first, "epoch": 2, "global_step": 8})
    assert epochs(current(read(path))) == [{"epoch": 1, "loss": 0.5}, {"epoch": 2, "loss": 1.0}]
    write(path, {"kind": "start", "global_step": 0}, step(1))
    assert [it["kind"] for it in current(read(path))] == ["note", "start", "start", "step"]


def test_the_last_record_of_an_epoch_counts() -> None:
    """However often it was done."""
    rows = [
        {"kind": "epoch", "time": 1.0, "epoch": n, "loss": x} for n, x in ((2, 3), (1, 1), (2, 2))
    ]
    assert epochs(rows) == [{"epoch": 1, "loss": 1}, {"epoch": 2, "loss": 2}]


def test_a_full_disk_is_an_error(tmp_path: Path) -> None:
    """Also where a part of the line still fits; what was there is still read."""
    with small_disk(tmp_path / "disk", 64) as disk:
        path = disk / "metrics.jsonl"
        file = Appender(path)

        def fill() -> None:
            for number in range(10_000):
                file.append(step(number, text="x" * 50))

        with pytest.raises(OSError, match="No space left"):
            fill()
        file.close()
        found = read(path)
        assert [record["global_step"] for record in found] == list(range(len(found)))
        assert len(found) > 100


def test_tensorboard_reads_the_events(tmp_path: Path) -> None:
    """Numbers of records that have a global step; what was done again is hidden."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from lockstep.metrics.events import Events

    events = Events(tmp_path)
    for number in (1, 2, 3):
        events.add(step(number, loss=float(number), name="text"))
    events.add({"kind": "note", "value": 1.0})
    events.start(2)
    events.add(step(3, loss=30.0))
    events.close()
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert found.Tags()["scalars"] == ["step/loss"]
    assert [(it.step, it.value) for it in found.Scalars("step/loss")] == [(1, 1), (2, 2), (3, 30)]


def test_tensorboard_is_missing(tmp_path: Path) -> None:
    """A named error, with the command that cures it; only where it is asked for."""
    program = (
        "import sys; sys.modules['tensorboard'] = None\n"
        "from pathlib import Path\n"
        "from lockstep.metrics.events import Events\n"
        "Events(Path('.'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert "SettingsError: --tensorboard" in done.stderr
    assert "pip install tensorboard" in done.stderr


def test_plain_lines(capfd: pytest.CaptureFixture[str]) -> None:
    """Where there is no terminal: what is said, and nothing else; on other ranks nothing at all."""
    for active in (True, False):
        progress = Progress(active)
        progress.start(1, 2, 3)
        progress.step(1)
        progress.say("[bold]a line[/bold]")
        progress.stop()
    assert capfd.readouterr().out == "[bold]a line[/bold]\n"


BAR = """
from lockstep.progress import Progress
progress = Progress(True)
progress.start(2, 3, 7, done=1)
progress.step(4)
progress.say("[a] line")
progress.stop()
"""


def on_a_terminal(program: str, columns: int, **environment: str) -> str:
    """Return what a program prints on a terminal of so many columns."""
    import fcntl
    import pty
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    command = [sys.executable, "-c", program]
    env = {**os.environ, "TERM": "xterm", **environment}
    with subprocess.Popen(command, stdout=theirs, stdin=subprocess.DEVNULL, env=env) as process:
        os.close(theirs)
        text = b""
        try:
            while data := os.read(ours, 65536):
                text += data
        except OSError:  # the other side is closed
            pass
        assert process.wait(120) == 0
    os.close(ours)
    return text.decode()


def test_a_bar_on_a_terminal() -> None:
    """With the epoch and the steps; a line goes above it, as it is."""
    text = on_a_terminal(BAR, 80)
    assert "epoch 2/3" in text
    assert "4/7" in text
    assert "[a] line\r\n" in text


@pytest.mark.parametrize("columns", [80, 0])
def test_a_terminal_at_which_nobody_looks(columns: int) -> None:
    """One without size is a launcher's; a dumb one cannot show a bar."""
    environment = {"TERM": "dumb"} if columns else {}
    assert on_a_terminal(BAR, columns, **environment) == "[a] line\r\n"


def test_no_terminal() -> None:
    """Output into a file or pipe."""
    program = f"import {terminal_width.__module__} as p; print(p.terminal_width())"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert json.loads(done.stdout) == 0
