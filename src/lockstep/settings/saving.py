"""The flags of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lockstep.settings.flags import Checked, flag


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
