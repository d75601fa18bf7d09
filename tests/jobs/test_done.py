"""A job that is started in the directory of a run that is DONE says so, and leaves it alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from launching import ROOT, need

LIMIT = 120.0


@pytest.mark.parametrize(
    "job", ["ptdist", "mnist_ddp", "sync_sgd", "resnet_ddp", "bench_allreduce"]
)
def test_started_again(job: str, tmp_path: Path) -> None:
    """One line on the root, code 0, no file written."""
    run = tmp_path / "run"
    run.mkdir()
    for name in ("DONE", "settings.json", "metrics.jsonl"):
        (run / name).write_text(f"{name} of before\n")
    program = (str(ROOT / "jobs" / f"{job}.py"), "--run", str(run))
    outcome = need("openmpi").run(2, *program, directory=tmp_path, limit=LIMIT)
    assert outcome.code == 0, str(outcome)
    assert outcome.text.count("is DONE") == 1, str(outcome)
    assert f"The run in {run} is DONE. " in outcome.text, str(outcome)
    assert "For a new run, name another --run." in outcome.text, str(outcome)
    assert ("give more --epochs" in outcome.text) == (job == "resnet_ddp"), str(outcome)
    assert "Traceback" not in outcome.text, str(outcome)
    left = {it.name: it.read_text() for it in run.iterdir()}
    assert left == {it: f"{it} of before\n" for it in ("DONE", "settings.json", "metrics.jsonl")}
