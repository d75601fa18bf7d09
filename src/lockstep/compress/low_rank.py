"""Matrices as products of two thin ones.

T. Vogels, S. P. Karimireddy, M. Jaggi, "PowerSGD: Practical low-rank gradient compression for
distributed optimization", 2019: a step of the power iteration a sum, from where the last one ended.
Tensors of more than two dimensions are matrices by their first one, as there; what would not become
smaller goes whole.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from lockstep.allreduce import allreduce
from lockstep.compress.feedback import Bucket, Compressor


class LowRank(Compressor):
    """PowerSGD with a warm start."""

    def __init__(self, name: str, buckets: list[Bucket], *rest: Any) -> None:
        super().__init__(name, buckets, *rest)
        generator = torch.Generator().manual_seed(1)
        # For each tensor the right factor, n x r, where the power iteration stands; or None.
        self._right = [
            [_right_factor(shape, int(self._number), bucket, generator) for shape in bucket.shapes]
            for bucket in buckets
        ]

    def _tensors(self) -> list[torch.Tensor]:
        factors = [right for row in self._right for right in row if right is not None]
        return [*self._kept, *factors]

    def _exchange(self, number: int, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        right = self._right[number]
        lengths = [shape.numel() for shape in self._buckets[number].shapes]
        total, given = torch.empty_like(wanted), wanted.clone()
        parts, totals, own = (t.split(lengths) for t in (wanted, total, given))
        thin = {i: factor for i, factor in enumerate(right) if factor is not None}
        matrices = {i: parts[i].view(-1, len(factor)) for i, factor in thin.items()}
        left = self._left({i: matrices[i] @ factor for i, factor in thin.items()})
        # The right factors and what goes whole, in one message.
        mine = [matrices[i].T @ left[i] if i in thin else part for i, part in enumerate(parts)]
        flat = torch.cat([one.reshape(-1) for one in mine])
        allreduce(flat, group=self._group)
        self._count(flat)
        for i, sum_ in enumerate(flat.split([one.numel() for one in mine])):
            if i not in thin:
                totals[i].copy_(sum_)
                continue
            multiply(left[i], mine[i], own[i].view_as(matrices[i]))
            multiply(left[i], sum_.view_as(mine[i]), totals[i].view_as(matrices[i]))
            thin[i].copy_(sum_.view_as(mine[i]))
            if not sum_.isfinite().all():
                thin[i].fill_(1.0)  # begin anew; all ranks see the same
        return total, given

    def _left(self, products: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return the left factors: orthonormal columns that span the sums of products. Collective.

        The root makes them, and all ranks get its bits: another kind of processor would make other
        ones. To sum to the root and send from there costs as many bytes as to sum for all.
        """
        if not products:
            return {}
        flat = torch.cat([product.reshape(-1) for product in products.values()])
        dist.reduce(flat, group=self._group, group_dst=0)
        parts = flat.split([product.numel() for product in products.values()])
        pairs = zip(products.items(), parts, strict=True)
        factors = {i: part.view_as(product) for (i, product), part in pairs}
        if self._rank == 0:
            for factor in factors.values():
                factor.copy_(torch.linalg.qr(factor.to(torch.float64)).Q)
        dist.broadcast(flat, group=self._group, group_src=0)
        self._count(flat)
        return factors

    def _count(self, flat: torch.Tensor) -> None:
        self.sent += 2 * flat.nbytes * (self._size - 1) // self._size


def multiply(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
    """Put left times right transposed into out, to the same bits on every kind of processor. Local.

    A library's product adds in an order of its own; these are single multiplications and additions.

    Args:
        left: [m, r].
        right: [n, r].
        out: [m, n].
    """
    torch.mul(left[:, :1], right[:, 0], out=out)
    for column in range(1, left.shape[1]):
        out += left[:, column : column + 1] * right[:, column]


def _right_factor(
    shape: torch.Size, rank: int, bucket: Bucket, generator: torch.Generator
) -> torch.Tensor | None:
    """Return the first right factor of a tensor, None if it goes whole."""
    if len(shape) < 2 or shape.numel() == 0:
        return None
    m, n = shape[0], shape.numel() // shape[0]
    rank = min(rank, m, n)
    if (m + n) * rank >= m * n:
        return None
    drawn = torch.randn(n, rank, generator=generator, dtype=torch.float64)
    return drawn.to(bucket.piece.device, bucket.wide)
