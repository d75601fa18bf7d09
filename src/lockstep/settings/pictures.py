"""The flags of a set of pictures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.settings.flags import Checked, flag


@dataclass(frozen=True)
class Pictures(Checked):
    """Where the pictures come from and what is done to them."""

    data: str = flag(
        "cifar10",
        "CIFAR-10; D/train/CLASS/* and D/test/CLASS/*; what needs no file; noise",
        ("cifar10", "imagefolder", "sample", "synthetic"),
    )
    data_dir: Path = flag(Path("data"), "where the pictures are, or are put")  # noqa: RUF009
    in_memory: str = flag("auto", "decode all pictures once", ("auto", "yes", "no"))
    workers: int = flag(2, "processes a rank that decode, if not in memory")
    augment: bool = flag(False, "move each picture by up to 4 pixels, and flip every other one")

    def __post_init__(self) -> None:
        """Refuse numbers that make no sense."""
        super().__post_init__()
        self._need_0_or_more("workers")

    def how(self) -> dict[str, Any]:
        """Return what `lockstep.data.load_pictures` is to be told besides. Local."""
        return {"in_memory": self.in_memory, "workers": self.workers}
