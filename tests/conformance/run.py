"""Runs torch's own tests of distributed backends over ours, all of them in one MPI job.

mpirun -np 4 python tests/conformance/run.py --backend gloo-name --json results.json
"""

from __future__ import annotations

import argparse
import fnmatch
import platform
import shutil
import sys
import tempfile
import time
import unittest
from pathlib import Path
from types import ModuleType

import torch
from mpi4py import MPI

import groups
import suite
from results import FAILED, RUNNING, SKIPPED, Report, Verdict, agree, load_report
from watchdog import Watchdog


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="torch's own backend tests in one MPI job")
    parser.add_argument("--backend", choices=groups.MODES, required=True)
    parser.add_argument("--json", type=Path, help="file for the verdicts")
    parser.add_argument("--only", default="*", help="run the tests that match this pattern")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for one test")
    parser.add_argument(
        "--group-timeout", type=float, default=20.0, help="timeout of a test's default group"
    )
    parser.add_argument(
        "--resume", action="store_true", help="keep the verdicts in the JSON file, run the rest"
    )
    options = parser.parse_args(arguments)
    if options.resume and options.json is None:
        parser.error("--resume needs --json")
    return options


def say(text: str) -> None:
    """Print to the real stdout at once; a test may have put something else in its place."""
    print(text, file=sys.__stdout__, flush=True)


class Runner:
    """Runs the tests one after the other; every rank takes the same steps."""

    def __init__(self, options: argparse.Namespace, comm: MPI.Intracomm, root: Path) -> None:
        """Import the suite for this rank."""
        self.options, self.comm, self.root = options, comm, root
        name = groups.torch_name(options.backend)
        suite.set_environment(name, comm.rank, comm.size, root)
        groups.register(options.backend)
        ours = groups.is_ours(options.backend)
        self.module: ModuleType = suite.import_suite(name, ours=ours)
        self.case = suite.make_case(self.module)
        self.skip_codes = suite.skip_codes()
        self.report = self._new_report()
        self.watchdog = Watchdog(comm, options.limit, self._hung)
        self.opened = 0

    def _new_report(self) -> Report:
        """Start the report, or continue an earlier one; only rank 0 writes it."""
        options = self.options
        meta = {
            "backend": options.backend,
            "ranks": self.comm.size,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "mpi": MPI.Get_library_version().partition(",")[0].partition("\n")[0].strip("\0 "),
        }
        path = options.json if self.comm.rank == 0 else None
        report = Report(meta, path)
        if options.resume and path is not None and path.exists():
            report.tests = load_report(path).tests
        report.tests = self.comm.bcast(report.tests)
        return report

    def _hung(self, name: str, reason: str) -> None:
        """Keep a hang's verdict; runs in the watchdog's thread right before the job's end."""
        if self.comm.rank != 0:
            return
        self.report.record(name, Verdict(FAILED, reason, self.options.limit))
        say(f"FAILED {name}: {reason}\n{self.report.totals()}; ended by a test that hangs")
        shutil.rmtree(self.root, ignore_errors=True)

    def run(self) -> None:
        """Run every test that is asked for and has no verdict yet."""
        names = unittest.TestLoader().getTestCaseNames(self.case)
        for name in fnmatch.filter(names, self.options.only):
            if name in self.report.tests:
                continue
            reason = groups.EXCLUDED.get(self.options.backend, {}).get(name)
            reason = reason or suite.static_skip(self.case, name)
            if reason is not None:
                self.report.record(name, Verdict(SKIPPED, reason))
                continue
            self.report.record(name, Verdict(RUNNING))
            with self.watchdog.guard(name):
                verdict = self._run_one(name)
            self.report.record(name, verdict)

    def _run_one(self, name: str) -> Verdict:
        """Run one test on every rank and agree on its verdict."""
        mine = self._attempt(name)
        self.watchdog.note = f"{mine.outcome}, waits for the others\n{mine.reason}".rstrip()
        verdicts = self.comm.allgather(mine)
        self.watchdog.note += "\nall ranks are through the test, the group is being closed"
        closing = self.comm.allgather(self._close())
        for rank, failure in enumerate(closing):
            if failure is not None and verdicts[rank].outcome != FAILED:
                verdicts[rank] = failure
        verdict = agree(verdicts)
        if verdict.outcome == FAILED and self.comm.rank == 0:
            self._show_failure(name, verdict, verdicts)
        return verdict

    def _attempt(self, name: str) -> Verdict:
        """Open the default group and run the test on this rank."""
        self._reset_file_barrier()
        rendezvous = self.root / f"store_{self.opened}"
        self.opened += 1
        custom = self.module.CUSTOM_PG_TIMEOUT.get(name, self.options.group_timeout)
        seconds = min(custom, self.options.group_timeout)
        start = time.perf_counter()
        try:
            groups.open_default(
                self.options.backend, rendezvous, self.comm.rank, self.comm.size, seconds
            )
        except Exception:
            return suite.failure_here(time.perf_counter() - start)
        result = suite.RankResult(self.skip_codes)
        self.case(name).run(result)
        return result.verdict(time.perf_counter() - start)

    def _reset_file_barrier(self) -> None:
        """Start the suite's own barrier from zero; it keeps files and counts calls."""
        barrier = self.module.Barrier
        barrier.barrier_id = 0
        if self.comm.rank == 0:
            barrier.init()
        self.comm.Barrier()

    def _close(self) -> Verdict | None:
        """Destroy the test's groups; return the failure to do so, if any."""
        try:
            groups.close_all()
        except Exception:
            return suite.failure_here()
        return None

    def _show_failure(self, name: str, verdict: Verdict, verdicts: list[Verdict]) -> None:
        """Print a failing test with the traceback of each rank that failed."""
        say(f"FAILED {name} {verdict.reason}")
        for rank, mine in enumerate(verdicts):
            if mine.outcome == FAILED:
                text = mine.reason.rstrip().replace("\n", f"\n  [{rank}] ")
                say(f"  [{rank}] {text}")


def main() -> int:
    """Run the suite; return the exit code, the same on every rank."""
    options = parse(sys.argv[1:])
    comm = MPI.COMM_WORLD.Dup()
    root = Path(comm.bcast(tempfile.mkdtemp(prefix="conformance-") if comm.rank == 0 else None))
    if comm.rank == 0:
        suite.prepare_directory(root)
    comm.Barrier()
    runner = Runner(options, comm, root)
    start = time.perf_counter()
    runner.run()
    if comm.rank == 0:
        say(f"{runner.report.totals()} in {time.perf_counter() - start:.0f} s")
        shutil.rmtree(root, ignore_errors=True)
    return 1 if runner.report.count(FAILED) else 0


if __name__ == "__main__":
    sys.exit(main())
