"""The commit that a run notes down, and the picture it draws."""

from __future__ import annotations

from pathlib import Path

from lockstep.metrics import draw, git_id

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
