"""Check the software: is it the same on all ranks?"""

from __future__ import annotations

import hashlib
import importlib
import platform
import time
from collections.abc import Mapping
from pathlib import Path

from lockstep.metrics import git_id
from lockstep.smoke.check import Check, Finding, Lab
from lockstep.smoke.compare import named, odd_ones

_PACKAGE = Path(__file__).parents[1]
_LOADED, _SLOW = "seconds to load", 10.0
# What may differ between ranks without a result that is wrong.
_MILD = ("CPU instructions", "system")


class Software(Check):
    """Whether Python, the libraries and the checkout are the same on all ranks."""

    name = "software"
    question = "Do all ranks run the same Python, libraries and code?"
    limit = 30.0

    def measure(self, lab: Lab) -> dict[str, str]:
        """Return a text for each part of the software of this rank."""
        import mpi4py
        import numpy as np
        import torch

        start = time.monotonic()
        # What the later checks load; where files are slow that takes longer than to use it. DDP
        # loads torch._dynamo when it is made.
        for name in ("torch.nn.parallel", "torch._dynamo", "lockstep.sgd", "lockstep.mpi_backend"):
            importlib.import_module(name)
        return {
            _LOADED: f"{time.monotonic() - start:.1f}",
            "Python": platform.python_version(),
            "torch": torch.__version__,
            "mpi4py": mpi4py.__version__,
            "numpy": np.__version__,
            "Lockstep": _fingerprint(_PACKAGE),
            "its compiled kernel": _kernel(),
            "commit": git_id(_PACKAGE) or "none",
            "CPU instructions": torch.backends.cpu.get_cpu_capability(),
            "system": f"{platform.system()} {platform.machine()}, {platform.libc_ver()[1]}",
        }

    def judge(self, answers: Mapping[int, dict[str, str]], lab: Lab) -> Finding:
        """Name the ranks that have something else than most."""
        first = {key: text for key, text in answers[min(answers)].items() if key != _LOADED}
        found = Finding(
            ", ".join(f"{key} {first[key]}" for key in ("Python", "torch", "mpi4py", "numpy"))
        )
        for key in first:
            common, others = odd_ones({rank: it[key] for rank, it in answers.items()})
            for value, ranks in others.items():
                text = f"{key} is {value} on {named(ranks, lab.roster)}, {common} on the others"
                if key in _MILD:
                    found.warn(text, "results may differ in the last bits; use nodes of one kind")
                else:
                    found.fail(text, _cure(key, lab.roster[ranks[0]].host))
        seconds = {rank: float(it[_LOADED]) for rank, it in answers.items()}
        slowest = max(seconds, key=lambda rank: seconds[rank])
        if seconds[slowest] > _SLOW:
            found.warn(
                f"{lab.roster[slowest]} took {seconds[slowest]:.0f} s to load torch's modules",
                "a venv on a local disk, or on a faster file system",
            )
        found.details = {"seconds to load": seconds[slowest]} | {
            "of rank 0" if 0 in answers else "of a rank": first
        }
        return found


def _cure(key: str, host: str) -> str:
    if key in ("Lockstep", "its compiled kernel", "commit"):
        return (
            f"one checkout on a shared path, or the same on {host}: git -C CHECKOUT status; "
            "env | grep PYTHONPATH"
        )
    return (
        f"one venv on a shared path; on {host}: which python; env | grep PYTHONPATH; "
        f"python -m pip show {key.lower()}"
    )


def _fingerprint(package: Path) -> str:
    """Return a sum over the code of the package: more than a version, it tells edits too."""
    total = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        total.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
    return total.hexdigest()[:12]


def _kernel() -> str:
    from lockstep.kernel import library

    return "there" if library() is not None else "not built"
