"""The flags of the MNIST jobs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lockstep.settings.cluster import Cluster
from lockstep.settings.flags import flag


@dataclass(frozen=True)
class Classic(Cluster):
    """The flags of the classic PyTorch MNIST script, with its defaults, and those of a cluster."""

    batch_size: int = flag(64, "images a rank takes at a step")
    test_batch_size: int = flag(1000, "images a rank tests at a time")
    epochs: int = flag(10, "how often each image is seen")
    lr: float = flag(0.01, "learning rate")
    momentum: float = flag(0.5, "momentum of SGD, 0 to below 1")
    data: str = flag("sample", "5,000 digits or all 70,000", ("sample", "mnist"))
    data_dir: Path = flag(Path("data"), "where MNIST is or is downloaded to")  # noqa: RUF009
    verify: int = flag(0, "repeat so many steps on one rank, and by the other way, and compare")
    channels_last: str = flag("auto", "memory format; auto measures", ("auto", "on", "off"))

    def __post_init__(self) -> None:
        """Refuse numbers that make no sense."""
        super().__post_init__()
        self._need_above_0("batch_size", "test_batch_size", "epochs", "lr")
        self._need("momentum", 0 <= self.momentum < 1, "from 0 to below 1")
        self._need_0_or_more("verify")
