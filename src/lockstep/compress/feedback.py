"""What all ways to compress share: error feedback, and a state that can be saved.

Why feedback is needed: S. P. Karimireddy, Q. Rebjock, S. U. Stich, M. Jaggi, "Error feedback fixes
SignSGD and other gradient compression schemes", 2019.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Bucket:
    """A piece of the gradients that is summed at once.

    Attributes:
        piece: flat; float32, float64, bfloat16 or float16, on the CPU or a GPU.
        shapes: of the tensors in it, in order.
    """

    piece: torch.Tensor
    shapes: tuple[torch.Size, ...]

    @property
    def wide(self) -> torch.dtype:
        """The dtype to compute in."""
        return torch.float64 if self.piece.dtype is torch.float64 else torch.float32

    def zeros(self, count: int | None = None) -> torch.Tensor:
        """Return so many zeros, by default as many as the piece has, in the wide dtype."""
        count = self.piece.numel() if count is None else count
        return torch.zeros(count, dtype=self.wide, device=self.piece.device)


class Compressor:
    """Sums pieces of gradients over all ranks, and keeps what it left out; see `make`.

    In every step all ranks call `begin`, then `reduce` for each bucket in order. What a rank has
    given for a batch that is thrown away after that is not taken back.

    Args:
        name: for messages and the state.
        buckets: the pieces.
        group: the ranks.
        number: what the way makes of it.
        feedback: whether to keep what is left out.

    Attributes:
        sent: bytes that this rank has put into collective verbs since it was made; what becomes of
            them on the way is the verb's own.
    """

    def __init__(
        self, name: str, buckets: list[Bucket], group: Any, number: float, feedback: bool
    ) -> None:
        self.sent = 0
        self._name, self._buckets, self._group = name, buckets, group
        self._number, self._feedback = number, feedback
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._examples = 0
        # Kept in the units of a mean over the examples. In those of a sum, what is left of a long
        # batch would outweigh a short one after it.
        self._kept = [bucket.zeros() for bucket in buckets]

    def begin(self, examples: int) -> int:
        """Begin a step. Collective.

        Args:
            examples: of this rank, 0 or more.

        Returns:
            the number of examples on all ranks.
        """
        # float64 counts exactly up to 2^53
        count = torch.tensor([float(examples)], dtype=torch.float64)
        if self._buckets:
            count = count.to(self._buckets[0].piece.device)
        dist.all_reduce(count, group=self._group)
        self._examples = int(count.item())
        return self._examples

    def begin_evenly(self) -> None:
        """Begin a step in which each rank counts for one example. Local."""
        self._examples = self._size

    @torch.no_grad()
    def reduce(self, number: int) -> None:
        """Replace a piece by about its sum over all ranks, the same bits on all. Collective.

        Args:
            number: of the bucket, whose piece holds sums over this rank's examples.
        """
        if self._examples == 0:
            return  # on all ranks alike: there is nothing to step along
        piece, kept = self._buckets[number].piece, self._kept[number]
        wanted = piece.to(kept.dtype) / self._examples + kept
        total, given = self._exchange(number, wanted)
        if self._feedback:
            torch.sub(wanted, given, out=kept)
            # What is not finite was sent, and seen; kept, it would come back for ever.
            kept.nan_to_num_(0.0, 0.0, 0.0)
        piece.copy_(total.mul_(self._examples))

    def kept(self, number: int) -> torch.Tensor:
        """Return what this rank keeps of a bucket, as a mean over the examples; no copy. Local."""
        return self._kept[number]

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank keeps: every rank has its own. Local."""
        return {**self._whose(), "tensors": self._tensors()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what this same rank has kept. Local.

        Raises:
            ValueError: it is of another rank, number of ranks, way to compress, or model.
        """
        targets, sources = self._tensors(), state.get("tensors", [])
        theirs = {key: state.get(key) for key in self._whose()}
        alike = [t.shape for t in targets] == [t.shape for t in sources]
        if theirs != self._whose() or not alike:
            raise ValueError(
                f"found what was kept for {theirs}, {sum(t.numel() for t in sources)} numbers\n"
                f"  needed: {self._whose()}, {sum(t.numel() for t in targets)} numbers\n"
                "  to do:  save the state of each rank, and go on with as many ranks"
            )
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    def _whose(self) -> dict[str, Any]:
        return {"compress": self._name, "rank": self._rank, "ranks": self._size}

    def _exchange(self, number: int, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum that all ranks get, and what this rank has given to it. Collective."""
        raise NotImplementedError

    def _tensors(self) -> list[torch.Tensor]:
        """Return all that a run needs to go on as if it had not stopped."""
        return list(self._kept)
