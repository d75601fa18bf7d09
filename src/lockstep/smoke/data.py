"""Check the data: are MNIST and CIFAR-10 there, whole, and the same on all nodes?"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

from lockstep.data import mnist
from lockstep.errors import DataError
from lockstep.smoke import cifar
from lockstep.smoke.check import Check, Finding, Lab
from lockstep.smoke.compare import odd_ones

_MISSING = "missing"
# How to get each set.
_GET = {
    "MNIST": "python jobs/mnist_ddp.py --data mnist --epochs 1 --data-dir {}   # downloads it",
    "CIFAR-10": "python jobs/resnet_ddp.py --data cifar10 --epochs 1 --data-dir {}   # fetches it",
}


class Data(Check):
    """Whether the data sets are whole and the same everywhere."""

    name = "data"
    question = "Are MNIST and CIFAR-10 there, whole, and the same on all nodes?"
    limit = 15.0

    def measure(self, lab: Lab) -> dict[str, str]:
        """Return a fingerprint of each set, or what is wrong with it; one rank a node reads."""
        directory = lab.options.data_dir
        if directory is None or lab.world.local_rank != 0:
            return {}
        found = {"MNIST": _MISSING, "CIFAR-10": _MISSING}
        if mnist_is_there(directory):
            found["MNIST"] = _told(lambda: _fingerprint(directory))
        if cifar.find(directory) is not None:
            found["CIFAR-10"] = _told(lambda: cifar.fingerprint(directory))
        return found

    def judge(self, answers: Mapping[int, dict[str, str]], lab: Lab) -> Finding:
        """Name the nodes that have another set than most, or a damaged one."""
        directory = lab.options.data_dir
        if directory is None:
            return Finding(
                "no directory was named: --data-dir DIR, with MNIST/raw/* or cifar-10-batches-py",
                applicable=False,
            )
        found = Finding()
        leaders = {rank: it for rank, it in answers.items() if it}
        texts = [_judge(found, name, leaders, lab, directory) for name in _GET] if leaders else []
        found.summary = "; ".join(texts)
        found.details = {lab.roster[rank].host: it for rank, it in leaders.items()}
        return found


def mnist_is_there(directory: Path) -> bool:
    """Say whether any file of MNIST is in the directory. Local."""
    raw = directory / "MNIST" / "raw"
    return any((raw / f"{name}{end}").exists() for name in mnist.CHECKSUMS for end in ("", ".gz"))


def _judge(
    found: Finding, name: str, leaders: Mapping[int, dict[str, str]], lab: Lab, directory: Path
) -> str:
    """Judge one set; return a few words on it."""
    cure = _GET[name].format(directory)
    values = {rank: it[name] for rank, it in leaders.items()}
    hosts = {rank: lab.roster[rank].host for rank in values}
    if set(values.values()) == {_MISSING}:
        found.warn(f"{name} is not in {directory}", cure)
        return f"{name} missing"
    for rank, value in values.items():
        if value == _MISSING:
            found.fail(f"{hosts[rank]}: {name} is not in {directory}", cure)
        elif value.startswith("damaged"):
            found.fail(f"{hosts[rank]}: {name} is {value}", f"remove it there; {cure}")
    good = {
        rank: value
        for rank, value in values.items()
        if value != _MISSING and not value.startswith("damaged")
    }
    if not good:
        return f"{name} damaged"
    common, others = odd_ones(good)
    for value, ranks in others.items():
        found.fail(
            f"{name} on {', '.join(hosts[rank] for rank in ranks)} is another ({value}) than on "
            f"the others ({common})",
            "the same files on all nodes, or a directory that they share",
        )
    return f"{name} {common}"


def _told(fingerprint: Callable[[], str]) -> str:
    try:
        return fingerprint()
    except (DataError, OSError, ValueError) as error:
        return f"damaged: {' '.join(str(error).splitlines()[0].split())}"


def _fingerprint(directory: Path) -> str:
    total = hashlib.sha256()
    images = 0
    for part in mnist.load(directory):
        total.update(part.images.numpy().data)
        total.update(part.labels.numpy().data)
        images += len(part)
    return f"whole, {images} images, sum {total.hexdigest()[:12]}"
