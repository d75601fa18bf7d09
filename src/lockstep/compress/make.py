"""Choose a way to compress by its name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.compress.feedback import Bucket, Compressor
from lockstep.compress.low_rank import LowRank
from lockstep.compress.rounded import Rounded
from lockstep.compress.sparse import Sparse
from lockstep.errors import SettingsError

_KINDS: dict[str, type[Compressor]] = {
    "bf16": Rounded,
    "fp16": Rounded,
    "powersgd": LowRank,
    "topk": Sparse,
}
NAMES = tuple(_KINDS)
# The rank of PowerSGD's matrices and the share of numbers that topk sends.
_NUMBERS = {"powersgd": 4.0, "topk": 0.01}


@dataclass(frozen=True)
class Compression:
    """A way to compress, the same on all ranks.

    Attributes:
        kind: one of NAMES.
        number: the rank for "powersgd", the share for "topk", else 0.
        feedback: False loses what is left out of a sum; it is there to show what that does.
    """

    kind: str
    number: float = 0.0
    feedback: bool = True

    def __str__(self) -> str:
        """Return what `parse` makes this of."""
        return f"{self.kind}:{self.number:g}" if self.number else self.kind


def parse(text: str) -> Compression:
    """Read one of NAMES, or "powersgd:R", "topk:S". Local.

    Raises:
        SettingsError: it is none; R is no whole number from 1 to 1024; S is not above 0, up to 1.
    """
    kind, colon, written = text.partition(":")
    number = _NUMBERS.get(kind, 0.0)
    good = kind in NAMES and (number > 0 or not colon)
    if good and colon:
        try:
            number = float(written)
        except ValueError:
            number = 0.0
        whole = 1 <= number <= 1024 and number == int(number)
        good = 0 < number <= 1 if kind == "topk" else whole
    if not good:
        raise SettingsError(
            f"found compress={text!r}",
            needed=f"one of {', '.join(NAMES)}; powersgd:R with a rank from 1 to 1024, topk:S with "
            "a share above 0, up to 1",
            cure="choose one of them",
        )
    return Compression(kind, number)


def make(
    compression: Compression | str,
    buckets: Sequence[tuple[torch.Tensor, Sequence[torch.Size]]],
    group: Any = None,
) -> Compressor:
    """Make the compressor of a model's gradients. Local.

    Args:
        compression: or its text, see `parse`.
        buckets: each flat piece of the gradients, and the shapes of the tensors in it, in order.
        group: the ranks; by default all.

    Raises:
        SettingsError: there is no such way.
    """
    if isinstance(compression, str):
        compression = parse(compression)
    laid_out = [Bucket(piece, tuple(shapes)) for piece, shapes in buckets]
    kind = _KINDS[compression.kind]
    return kind(str(compression), laid_out, group, compression.number, compression.feedback)
