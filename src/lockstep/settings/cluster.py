"""The flags of every training job on a cluster: how ranks meet, and where a run is written to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from lockstep.devices import device
from lockstep.ending import SETTLE, within
from lockstep.errors import SettingsError
from lockstep.metrics import RunDirectory
from lockstep.session import session
from lockstep.settings.flags import Checked, flag
from lockstep.together import on_all
from lockstep.world import World

# What each rank or node may have of its own: the rest would make the ranks train different models.
_OWN = {"no_cuda", "timeout", "data_dir", "workers"}


@dataclass(frozen=True)
class Cluster(Checked):
    """Ranks, devices, the seed, and the run's directory."""

    no_cuda: bool = flag(False, "use the CPU even where there is a GPU")
    device: str = flag("auto", "auto takes the GPU with nccl", ("auto", "cpu", "cuda"))
    tf32: bool = flag(False, "let GPUs compute float32 with 10 bits of mantissa")
    cudnn_benchmark: bool = flag(False, "let cuDNN try its algorithms; not reproducible")
    seed: int = flag(1, "of the first weights, the order of the images and dropout")
    world_size: int | None = flag(None, "number of ranks that MPI must have started")
    init_method: str | None = flag(None, "how the ranks meet: file:///shared/dir, tcp or env")
    backend: str = flag("mpi", "of torch.distributed", ("mpi", "gloo", "nccl"))
    timeout: float = flag(300.0, "seconds until a wait for another rank is an error")
    log_interval: int = flag(10, "steps between two lines of progress")
    run_dir: Path = flag(Path("runs"), "where the run's directory is made")  # noqa: RUF009
    run: Path | None = flag(None, "the run itself, continued if it is there")  # noqa: RUF009
    group_name: str | None = flag(None, "label of the run, part of the run directory's name")
    tensorboard: bool = flag(False, "write events for TensorBoard too")

    def __post_init__(self) -> None:
        """Refuse numbers that make no sense."""
        super().__post_init__()
        self._need_above_0("log_interval", "timeout")
        self._need("seed", 0 <= self.seed < 2**31, "from 0 to 2^31 - 1")
        label = self.group_name
        self._need("group_name", label is None or label.isprintable(), "text without control codes")
        self._need("group_name", not label or "/" not in label, "a name without a slash")
        cpu = self.no_cuda or self.device == "cpu"
        self._need("backend", not (cpu and self.backend == "nccl"), "mpi or gloo on CPUs")
        self._need("device", self.device != "cuda" or self.backend == "nccl", "--backend nccl")

    @contextmanager
    def session(self) -> Iterator[World]:
        """Open torch.distributed as the flags say, for a ``with``. Collective.

        Raises:
            SettingsError: on all ranks: they were given different flags.
            LockstepError: see `lockstep.session`.
        """
        with session(
            backend=self.backend,
            rendezvous=self.init_method,
            timeout=self.timeout,
            world_size=self.world_size,
        ) as world:
            self._compare(world)
            yield world

    def _compare(self, world: World) -> None:
        """See to it that all ranks were given the same. Collective; all have just met."""
        mine = {name: str(it) for name, it in asdict(self).items() if name not in _OWN}
        with within(SETTLE, "comparing the flags of the ranks"):
            first: dict[str, str] = world.comm.bcast(mine, root=0)

        def check() -> None:
            names = [name for name in {**first, **mine} if first.get(name) != mine.get(name)]
            spelt = [
                f"--{name.replace('_', '-')} {mine.get(name)}, rank 0 {first.get(name)}"
                for name in names
            ]
            if spelt:
                raise SettingsError(
                    f"has {'; '.join(spelt[:6])}",
                    needed="the same flags on all ranks",
                    cure="give every rank the same command line",
                )

        on_all(world, check, "compare the flags")

    def choose_device(self, world: World) -> torch.device:
        """Return the device of this rank, set up as the flags say. Collective."""
        kind = "cuda" if self.backend == "nccl" else "cpu"
        return device(world, kind, tf32=self.tf32, cudnn_benchmark=self.cudnn_benchmark)

    def run_directory(self, world: World, name: str, **facts: Any) -> RunDirectory:
        """Open the run's directory as the flags say: a new one, or that of --run. Collective.

        Args:
            world: the ranks.
            name: of the job.
            facts: what else is to be noted about the run.

        Raises:
            SettingsError, StorageError: on all ranks: it cannot be used.
        """
        label = f"{name}-{self.group_name}" if self.group_name else name
        return RunDirectory(
            world,
            self.run_dir,
            label,
            self,
            facts,
            exact=self.run,
            tensorboard=self.tensorboard,
            timeout=self.timeout,
        )
