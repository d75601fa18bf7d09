"""Runs torch's own tests of backends over ours, and compares them with torch's gloo.

`pytest tests/test_conformance.py -rP` shows the table.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from launching import ROOT, Outcome, Program, need

FOLDER = ROOT / "tests" / "conformance"
# The modes of run.py, and the number of ranks that tests/conformance/README.md gives for each.
MODES = {"gloo-name": 4, "mpi": 3}
LIMIT = 420.0


class Runs:
    """The runs of the suite, each made when it is first asked for."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._outcomes: dict[str, Outcome] = {}

    def verdicts(self, mode: str) -> Path:
        """Return the file in which a run leaves its verdicts."""
        return self.directory / f"{mode}.json"

    def outcome(self, mode: str) -> Outcome:
        """Run the suite in a mode."""
        if mode not in self._outcomes:
            mpi = need("openmpi")
            options = ("--backend", mode, "--json", str(self.verdicts(mode)))
            command = mpi.command(MODES[mode], str(FOLDER / "run.py"), *options)
            program = Program(command, mpi.environment(), self.directory, mode)
            self._outcomes[mode] = program.finish(LIMIT)
        return self._outcomes[mode]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Return the runs, shared by the tests of this file."""
    return Runs(tmp_path_factory.mktemp("conformance"))


@pytest.mark.parametrize("mode", MODES)
def test_no_test_of_torch_s_fails(runs: Runs, mode: str) -> None:
    """Skips are torch's own or listed with a reason."""
    outcome = runs.outcome(mode)
    assert not outcome.timed_out, str(outcome)
    assert outcome.code == 0, str(outcome)


def test_whatever_passes_on_gloo_passes_here(runs: Runs) -> None:
    """In one mode or the other."""
    for mode in MODES:
        runs.outcome(mode)
    files = [str(runs.verdicts(mode)) for mode in MODES]
    done = subprocess.run(
        [need("openmpi").python, str(FOLDER / "table.py"), *files],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
