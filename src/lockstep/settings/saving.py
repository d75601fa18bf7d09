"""The flags of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lockstep.checkpoint import Checkpoints, check_export
from lockstep.settings.flags import Checked, flag
from lockstep.together import LIMIT, on_root
from lockstep.world import World


@dataclass(frozen=True)
class Saving(Checked):
    """When checkpoints are written, and which one a run goes on from."""

    resume: str = flag("auto", "auto: the newest valid checkpoint of the run; none; or a file")
    save_steps: int = flag(0, "steps between two checkpoints; 0 for none")
    save_minutes: float = flag(10.0, "minutes between two checkpoints; 0 for none")
    keep: int = flag(3, "checkpoints that are kept, the newest ones")
    export: Path | None = flag(None, "write the weights here in the end, safetensors")  # noqa: RUF009

    def __post_init__(self) -> None:
        """Refuse numbers that make no sense."""
        super().__post_init__()
        self._need_0_or_more("save_steps", "save_minutes")
        self._need_above_0("keep")
        self._need("resume", bool(self.resume), "auto, none, or the path of a checkpoint")

    def checkpoints(self, world: World, run: Path, timeout: float = LIMIT) -> Checkpoints:
        """Open the checkpoints of a run, for a ``with``; look whether --export is possible.

        Collective.

        Args:
            world: the ranks.
            run: the run's directory.
            timeout: seconds to wait for the other ranks, and for the disk.

        Raises:
            StorageError: on all ranks, if either cannot be written to.
        """
        if (export := self.export) is not None:
            on_root(world, lambda: check_export(export), "look where the model is exported to")
        return Checkpoints(
            world,
            run / "checkpoints",
            keep=self.keep,
            every_steps=self.save_steps,
            every_minutes=self.save_minutes,
            timeout=timeout,
        )
