"""TensorBoard events of a run. Everything here is Local."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lockstep.errors import SettingsError

# The directory below that of the run.
TENSORBOARD = "tensorboard"
_NOT_DRAWN = ("kind", "time", "at_seconds", "global_step", "epoch", "step")


class Events:
    """Writes the numbers of each record as scalars, into the directory `tensorboard` of a run.

    Args:
        run: the run directory.

    Raises:
        SettingsError: the package tensorboard is not installed.
    """

    def __init__(self, run: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise SettingsError(
                f"--tensorboard: {error}",
                needed="the package tensorboard in this environment",
                cure="pip install tensorboard, or leave --tensorboard out",
            ) from error
        self._kind, self._run = SummaryWriter, run
        self._writer: Any = None

    def start(self, global_step: int) -> None:
        """Go on after a step; what an earlier start has written of later ones is hidden."""
        self.close()
        self._writer = self._kind(str(self._run / TENSORBOARD), purge_step=global_step + 1)

    def add(self, record: dict[str, Any]) -> None:
        """Write a record that has a global_step; others are left out.

        Raises:
            OSError: it cannot be written.
        """
        if "global_step" not in record:
            return
        if self._writer is None:
            self._writer = self._kind(str(self._run / TENSORBOARD))
        for name, value in record.items():
            if name not in _NOT_DRAWN and isinstance(value, int | float):
                tag = f"{record['kind']}/{name}"
                self._writer.add_scalar(tag, value, record["global_step"])

    def close(self) -> None:
        """Write all that is still in memory."""
        if self._writer is not None:
            self._writer.close()
        self._writer = None
