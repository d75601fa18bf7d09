"""Settings of a job: one frozen dataclass, read from the command line, checked when made.

Each field is a flag. A class gives the fields, `parse` the rest:

    @dataclass(frozen=True)
    class Settings(Classic):
        allreduce: str = flag("auto", "algorithm", choices=("auto", "ring"))

    settings = parse(Settings, argv, "What the job does.")
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import torch

from lockstep.devices import device
from lockstep.errors import SettingsError
from lockstep.session import session
from lockstep.world import World

S = TypeVar("S")


def flag(default: Any, about: str, choices: Sequence[str] | None = None) -> Any:
    """Return a field of a dataclass that is a flag of a job. Local."""
    return field(default=default, metadata={"help": about, "choices": choices})


def parse(
    kind: type[S],
    argv: Sequence[str] | None,
    description: str | None,
    presets: Callable[[S], dict[str, Any]] | None = None,
) -> S:
    """Read the settings from the command line. Local; starts no MPI.

    Args:
        kind: a frozen dataclass whose fields are made with `flag`.
        argv: the arguments; None for those of the command line.
        description: what the job does, for --help.
        presets: given the settings, returns other defaults for the flags that were not given.

    Raises:
        SystemExit: 0 after --help; 2, with a message, after a flag that is unknown or wrong.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    hints = get_type_hints(kind)
    for one in fields(kind):  # type: ignore[arg-type]  # a dataclass
        _add(parser, one.name, hints[one.name], one.default, one.metadata)
    try:
        settings = kind(**vars(parser.parse_args(argv)))
        if presets is not None and (others := presets(settings)):
            parser.set_defaults(**others)
            settings = kind(**vars(parser.parse_args(argv)))
    except SettingsError as error:
        parser.error(str(error))
    return settings


def _add(
    parser: argparse.ArgumentParser, name: str, hint: Any, default: Any, metadata: Any
) -> None:
    flags, about = "--" + name.replace("_", "-"), metadata["help"]
    if hint is bool:
        parser.add_argument(flags, action="store_true", default=default, help=about)
        return
    kind = next((one for one in get_args(hint) if one is not type(None)), hint)
    about += "" if default is None else f" (default {default})"
    parser.add_argument(flags, type=kind, default=default, choices=metadata["choices"], help=about)


@dataclass(frozen=True)
class Classic:
    """The flags of the classic PyTorch MNIST script, with its defaults, and those of a cluster."""

    batch_size: int = flag(64, "images a rank takes at a step")
    test_batch_size: int = flag(1000, "images a rank tests at a time")
    epochs: int = flag(10, "how often each image is seen")
    lr: float = flag(0.01, "learning rate")
    momentum: float = flag(0.5, "momentum of SGD, 0 to below 1")
    no_cuda: bool = flag(False, "use the CPU even where there is a GPU")
    device: str = flag("auto", "auto takes the GPU with nccl", ("auto", "cpu", "cuda"))
    tf32: bool = flag(False, "let GPUs compute float32 with 10 bits of mantissa")
    cudnn_benchmark: bool = flag(False, "let cuDNN try its algorithms; not reproducible")
    seed: int = flag(1, "of the first weights, the order of the images and dropout")
    log_interval: int = flag(10, "steps between two lines of progress")
    world_size: int | None = flag(None, "number of ranks that MPI must have started")
    init_method: str | None = flag(None, "how the ranks meet: file:///shared/dir, tcp or env")
    group_name: str | None = flag(None, "label of the run, part of the run directory's name")
    backend: str = flag("mpi", "of torch.distributed", ("mpi", "gloo", "nccl"))
    timeout: float = flag(300.0, "seconds until a wait for another rank is an error")
    data: str = flag("sample", "5,000 digits or all 70,000", ("sample", "mnist"))
    data_dir: Path = flag(Path("data"), "where MNIST is or is downloaded to")  # noqa: RUF009
    run_dir: Path = flag(Path("runs"), "where the run's directory is made")  # noqa: RUF009
    verify: int = flag(0, "repeat so many steps on one rank, and by the other way, and compare")
    channels_last: str = flag("auto", "memory format; auto measures", ("auto", "on", "off"))

    def __post_init__(self) -> None:
        """Refuse numbers that make no sense."""
        for name in ("batch_size", "test_batch_size", "epochs", "log_interval", "timeout", "lr"):
            self._need(name, getattr(self, name) > 0, "above 0")
        self._need("momentum", 0 <= self.momentum < 1, "from 0 to below 1")
        self._need("seed", 0 <= self.seed < 2**31, "from 0 to 2^31 - 1")
        self._need("verify", self.verify >= 0, "0 or more")
        label = self.group_name
        self._need("group_name", label is None or label.isprintable(), "text without control codes")
        self._need("group_name", not label or "/" not in label, "a name without a slash")
        cpu = self.no_cuda or self.device == "cpu"
        self._need("backend", not (cpu and self.backend == "nccl"), "mpi or gloo on CPUs")
        self._need("device", self.device != "cuda" or self.backend == "nccl", "--backend nccl")

    def session(self) -> AbstractContextManager[World]:
        """Open torch.distributed as the flags say, for a ``with``. Collective."""
        return session(
            backend=self.backend,
            rendezvous=self.init_method,
            timeout=self.timeout,
            world_size=self.world_size,
        )

    def choose_device(self, world: World) -> torch.device:
        """Return the device of this rank, set up as the flags say. Collective."""
        kind = "cuda" if self.backend == "nccl" else "cpu"
        return device(world, kind, tf32=self.tf32, cudnn_benchmark=self.cudnn_benchmark)

    def _need(self, name: str, good: bool, needed: str) -> None:
        if not good:
            flags = "--" + name.replace("_", "-")
            raise SettingsError(
                f"found {flags} {getattr(self, name)!r}", needed=needed, cure=f"change {flags}"
            )
