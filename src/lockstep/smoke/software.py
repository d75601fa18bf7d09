"""Check the software: is it the same on all ranks?"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from pathlib import Path

from lockstep.metrics import git_id
from lockstep.smoke.check import Check, Finding, Lab
from lockstep.smoke.compare import named, odd_ones

_PACKAGE = Path(__file__).parents[1]
# What may differ between ranks without a result that is wrong.
_MILD = ("CPU instructions", "system")


class Software(Check):
    """Whether Python, the libraries and the checkout are the same on all ranks."""

    name = "software"
    question = "Do all ranks run the same Python, libraries and code?"
    limit = 15.0

    def measure(self, lab: Lab) -> dict[str, str]:
        """Return a text for each part of the software of this rank."""
        import mpi4py
        import numpy as np
        import torch

        return {
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
        first = answers[min(answers)]
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
        found.details = {"of rank 0" if 0 in answers else "of a rank": first}
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
