"""Run pytest inside of mpirun: all ranks run the same tests and agree on each outcome.

    mpirun -n 3 python -m pytest tests/mpi

A test that fails on one rank fails on all; rank 0 reports for all. A test that hangs shows the
stacks of all ranks and ends the job.
"""

from __future__ import annotations

import faulthandler
import os
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Self, TextIO

import pytest
import torch
import torch.distributed as dist
from _pytest.runner import runtestprotocol

import lockstep
from lockstep import kernel

# MPI is started by the package, as in a job; to import mpi4py.MPI first would start it before.
_world = lockstep.discover()

from mpi4py import MPI  # noqa: E402

LIMIT = 60.0
GROUP_TIMEOUT = timedelta(seconds=20)
# Between the stacks and the end, so that no rank is ended before it has shown its own.
_GRACE = 3.0

_comm: MPI.Intracomm = MPI.COMM_WORLD.Dup()
_stderr: TextIO | None = None
# After a failure the ranks may have called different verbs; the next test gets a new group.
_stale = False


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Register the markers; let rank 0 alone print."""
    config.addinivalue_line("markers", "ranks(at_least, exactly): the number of ranks it needs")
    config.addinivalue_line("markers", "limit(seconds): how long the test may take")
    config.addinivalue_line("markers", "large: moves gigabytes")
    global _stderr
    # pytest puts files of its own in place of the streams; this one stays the launcher's.
    _stderr = os.fdopen(os.dup(2), "w")
    if _comm.rank != 0:
        manager = config.pluginmanager
        manager.unregister(name="terminalreporter")
        silent = open(os.devnull, "w")  # noqa: SIM115  # open as long as the run lasts
        manager.register(pytest.TerminalReporter(config, silent), "terminalreporter")


def pytest_report_header() -> str:
    """Name the MPI and the number of ranks."""
    return f"{_comm.size} ranks, {MPI.Get_library_version().splitlines()[0][:60]}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse to run different tests on different ranks; skip what the number of ranks forbids."""
    names = [item.nodeid for item in items]
    if any(other != names for other in _comm.allgather(names)):
        pytest.exit("the ranks have collected different tests", returncode=3)
    for item in items:
        for mark in item.iter_markers("ranks"):
            least, exactly = (*mark.args, 0)[0], mark.kwargs.get("exactly")
            if _comm.size < least or exactly not in (None, _comm.size):
                wanted = f"exactly {exactly}" if exactly else f"at least {least}"
                reason = f"needs {wanted} ranks, has {_comm.size}"
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """Run a test under its limit, then report what all ranks say of it."""
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    mark = item.get_closest_marker("limit")
    with _Limit(item.nodeid, mark.args[0] if mark else LIMIT) as limit:
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        limit.note = "".join(_describe(report) for report in reports if report.failed)
        _agree(reports)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """End with the same code on all ranks."""
    session.exitstatus = _comm.allreduce(int(exitstatus), MPI.MAX)


def pytest_internalerror(excrepr: object) -> None:
    """End all ranks: the others would wait for this one."""
    assert _stderr is not None
    _stderr.write(f"rank {_comm.rank}: {excrepr}\n")
    _stderr.flush()
    MPI.COMM_WORLD.Abort(3)


@pytest.fixture(scope="session")
def world() -> lockstep.World:
    """Return the world of this run."""
    return _world


@pytest.fixture(scope="session")
def comm() -> MPI.Intracomm:
    """Return a communicator of the tests' own, to check the backend by."""
    return _comm


@pytest.fixture(autouse=True)
def default_group(request: pytest.FixtureRequest) -> Iterator[None]:
    """See to it that a default group is open, a new one after a test that left none or broke it."""
    torch.manual_seed(1)
    if "no_group" in request.fixturenames:
        yield
        return
    global _stale
    if _stale and dist.is_initialized():
        dist.destroy_process_group()
    _stale = False
    if not dist.is_initialized():
        dist.init_process_group("mpi", timeout=GROUP_TIMEOUT)
    yield


@pytest.fixture
def no_group() -> Iterator[None]:
    """Close the default group before the test, and what the test has opened after it."""
    if dist.is_initialized():
        dist.destroy_process_group()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


class _Limit:
    """Ends the job, with the stacks of all ranks, if its body takes too long."""

    def __init__(self, name: str, seconds: float) -> None:
        self._name, self._seconds = name, seconds
        self.note = ""
        # One rank after the other, so that their stacks do not mix.
        self._timer = threading.Timer(seconds + 0.3 * _comm.rank, self._show)

    def __enter__(self) -> Self:
        assert _stderr is not None
        self._timer.daemon = True
        self._timer.start()
        # In C, since a thread cannot run while MPI holds the interpreter's lock.
        faulthandler.dump_traceback_later(self._seconds + _GRACE, exit=True, file=_stderr)
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        faulthandler.cancel_dump_traceback_later()

    def _show(self) -> None:
        assert _stderr is not None
        _stderr.write(f"rank {_comm.rank}: {self._name} exceeds {self._seconds:g} s\n")
        _stderr.write(f"failed before that: {self.note}\n" if self.note else "")
        _stderr.flush()
        faulthandler.dump_traceback(file=_stderr)


def _agree(reports: list[pytest.TestReport]) -> None:
    """Make a failure on one rank one on all, with the failing ranks named. Collective."""
    outcome = max((_severity(report) for report in reports), default=0)
    text = "\n".join(_describe(report) for report in reports if report.failed)
    everyone = _comm.allgather((outcome, text))
    outcomes = [theirs for theirs, _ in everyone]
    if max(outcomes) < 2 and len(set(outcomes)) == 1:
        return
    failed = [rank for rank, theirs in enumerate(outcomes) if theirs == 2]
    lines = [f"failed on rank {', '.join(map(str, failed))} of {_comm.size}"]
    if not failed:
        lines = [f"skipped on some ranks only: {[theirs == 1 for theirs in outcomes]}"]
    lines += [f"--- rank {rank}\n{everyone[rank][1]}" for rank in failed]
    global _stale
    _stale = True
    del reports[1:]
    reports[0].outcome, reports[0].when = "failed", "call"
    reports[0].longrepr = "\n".join(lines)


def _severity(report: pytest.TestReport) -> int:
    return 2 if report.failed else 1 if report.skipped else 0


def _describe(report: pytest.TestReport) -> str:
    parts = [report.longreprtext]
    parts += [f"{title}\n{content}" for title, content in report.sections if content.strip()]
    return "\n".join(parts)


@pytest.fixture(params=["compiled", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Sum with the compiled kernel, and without."""
    if request.param == "torch":
        monkeypatch.setenv("LOCKSTEP_KERNEL", "0")
        kernel.library.cache_clear()
    elif kernel.library() is None:
        pytest.skip("no compiled kernel here: the package was built without a C compiler")
    yield str(request.param)
    monkeypatch.undo()
    kernel.library.cache_clear()


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """Return one directory that all ranks see."""
    return Path(_comm.bcast(str(tmp_path), root=0))
