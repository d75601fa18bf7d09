"""The flags of how a network is computed: memory format, digits, compiler, determinism."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lockstep.batchnorm import synchronous_batchnorm
from lockstep.settings.flags import Checked, flag


@dataclass(frozen=True)
class Numerics(Checked):
    """What changes the time of a step and the last digits, and nothing else."""

    channels_last: bool = flag(False, "pictures and kernels lie in memory channel by channel")
    amp: str = flag("off", "digits of the forward pass, by autocast", ("off", "bf16"))
    compile: bool = flag(False, "torch.compile; needs a C++ compiler on CPUs")
    sync_batchnorm: bool = flag(False, "batch norm over the images of all ranks")
    deterministic: bool = flag(False, "the same bits in each run on as many ranks")

    def __post_init__(self) -> None:
        """Refuse what contradicts itself."""
        super().__post_init__()
        tries = self.deterministic and getattr(self, "cudnn_benchmark", False)
        self._need("deterministic", not tries, "no --cudnn-benchmark beside it")

    def make_deterministic(self) -> None:
        """Let torch refuse what is not reproducible, if the flags say so. Local; before CUDA."""
        if self.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
            torch.backends.cudnn.benchmark = False

    @property
    def layout(self) -> torch.memory_format:
        """The memory format of the model and its batches."""
        return torch.channels_last if self.channels_last else torch.contiguous_format

    def place(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Return a model on a device as the flags say, for training. Local."""
        anything: Any = synchronous_batchnorm(model) if self.sync_batchnorm else model
        placed: nn.Module = anything.to(device=device, memory_format=self.layout)
        return placed

    def numerics(self) -> dict[str, Any]:
        """Return what `lockstep.steps` is to be told of this. Local."""
        return {
            "amp": torch.bfloat16 if self.amp == "bf16" else None,
            "compiled": self.compile,
            "deterministic": self.deterministic,
        }
