"""Prepares torch's own tests of backends to be run rank by rank inside one MPI job."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
import unittest
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, TypeAlias

from results import FAILED, PASSED, SKIPPED, Verdict

MODULE = "torch.testing._internal.distributed.distributed_test"
HELPERS = "torch.testing._internal.common_distributed"

ExcInfo: TypeAlias = (
    tuple[type[BaseException], BaseException, TracebackType] | tuple[None, None, None]
)


def prepare_directory(root: Path) -> None:
    """Lay out the directory that the suite's file barrier and its tests expect."""
    for name in ("barrier", "test_dir", "init_dir"):
        (root / name).mkdir()


def set_environment(backend: str, rank: int, size: int, root: Path) -> None:
    """Set what the suite reads from the environment, much of it at import."""
    os.environ.update(
        BACKEND=backend,
        RANK=str(rank),
        WORLD_SIZE=str(size),
        TEMP_DIR=str(root),
        # With a file, not env://, the one test that opens the default group again is run too.
        INIT_METHOD=f"file://{root / 'init_dir' / 'shared_init_file'}",
        # A hint how to run one test alone that does not hold here, at the end of each failure.
        PYTORCH_PRINT_REPRO_ON_FAILURE="0",
    )


def import_suite(backend: str, *, ours: bool) -> ModuleType:
    """Import torch's test module; the environment must be set."""
    helpers: Any = importlib.import_module(HELPERS)
    # torch skips these below 8 ranks to spare its own machines; they need 3.
    helpers.skip_if_small_worldsize = lambda function: function
    module = importlib.import_module(MODULE)
    if ours:
        # These lists name the backends whose C++ code emits profiler events "<name>:<verb>". A
        # backend written in Python has no such code; the verbs themselves are still tested.
        for name in ("PROFILING_SUPPORTED_BACKENDS", "SEND_RECV_PROFILING_SUPPORTED_BACKENDS"):
            getattr(module, name).remove(backend)
    return module


def make_case(module: ModuleType) -> type[unittest.TestCase]:
    """Mix torch's tests into a test case whose processes are the ranks of this job."""
    from torch.testing._internal.common_utils import TestCase

    base: Any = module.DistributedTest._DistTestBase

    # torch's annotations do not reach its test base: mypy sees Any.
    class Conformance(TestCase, base):  # type: ignore[misc]
        """Torch's tests, with the attributes that its launcher gives them."""

        rank = int(os.environ["RANK"])
        # A string, as in torch's own launcher.
        world_size = os.environ["WORLD_SIZE"]
        file_name = str(Path(os.environ["TEMP_DIR"]) / "second_init_file")
        init_method = f"file://{file_name}"
        skip_return_code_checks: tuple[str, ...] = ()

    return Conformance


def static_skip(case: type[unittest.TestCase], name: str) -> str | None:
    """Return why a test is skipped on every rank before it starts, or None."""
    method = getattr(case, name)
    if getattr(method, "__unittest_skip__", False):
        return str(getattr(method, "__unittest_skip_why__", ""))
    return None


class RankResult(unittest.TestResult):
    """One rank's result of one test, in which the suite's exit codes for skips are skips."""

    def __init__(self, skip_codes: dict[int, str]) -> None:
        """Take the exit codes by which a test says that it skips itself."""
        super().__init__()
        self.skip_codes = skip_codes

    def addError(self, test: unittest.TestCase, err: ExcInfo) -> None:
        """Keep an error, unless it is an exit that means a skip."""
        error = err[1]
        if isinstance(error, SystemExit) and error.code in self.skip_codes:
            assert isinstance(error.code, int)
            self.addSkip(test, self.skip_codes[error.code])
            return
        super().addError(test, err)

    def verdict(self, seconds: float) -> Verdict:
        """Sum the result up."""
        problems = [text for _, text in self.errors + self.failures]
        problems += ["unexpected success" for _ in self.unexpectedSuccesses]
        if problems:
            return Verdict(FAILED, "\n".join(problems), seconds)
        if self.skipped:
            return Verdict(SKIPPED, self.skipped[0][1], seconds)
        return Verdict(PASSED, "", seconds)


def skip_codes() -> dict[int, str]:
    """Map the exit codes of the suite's skips to their reasons."""
    helpers = importlib.import_module(HELPERS)
    return {skip.exit_code: skip.message for skip in helpers.TEST_SKIPS.values()}


def failure_here(seconds: float = 0.0) -> Verdict:
    """Make a verdict of the exception that is being handled."""
    error = sys.exc_info()[1]
    assert error is not None
    return Verdict(FAILED, "".join(traceback.format_exception(error)), seconds)
