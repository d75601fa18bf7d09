"""What the optimizers that keep ranks in step have in common: their gradients."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from lockstep.gradients import Gradients
from lockstep.replicas import clip


class InStep:
    """An optimizer whose gradients are summed over all ranks.

    Attributes:
        gradients: of the parameters.
    """

    gradients: Gradients
    _group: Any
    _max_norm: float | None

    @property
    def communication_seconds(self) -> float:
        """Seconds that the calling thread has waited for communication since the start."""
        return self.gradients.waited

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Set all gradients to zero, whatever set_to_none is: they stay views. Local."""
        self.gradients.zero()

    def backward(self, loss: torch.Tensor, *, examples: int) -> None:
        """Compute the gradients of a batch, and sum them over all ranks meanwhile.

        Collective in effect: every rank calls step() afterwards, a rank without data that alone.

        Args:
            loss: scalar, the mean over the examples.
            examples: local batch size.
        """
        self.gradients.backward(loss, examples)

    def accumulate(self) -> AbstractContextManager[None]:
        """Let backward() inside of the ``with`` add gradients without communication. Local."""
        return self.gradients.accumulate()

    def reduce(self, *, examples: int | None = None) -> int:
        """Make the gradients those of the joined batch, before step() does it. Collective.

        For a look at them, or a clipping of one's own, between backward and step.

        Returns:
            the number of examples on all ranks together.
        """
        return self.gradients.reduce(examples)

    def close(self) -> None:
        """Let go of the model, stop the thread and close the group. Collective.

        A program that makes one optimizer need not; one that makes many should.
        """
        self.gradients.close()
        dist.destroy_process_group(self._group)

    def __deepcopy__(self, memo: object) -> NoReturn:
        """Refuse: two optimizers on one model would both sum its gradients."""
        raise TypeError(
            f"{type(self).__name__} cannot be copied: it holds the gradients of its model\n"
            "  needed: one for each model\n"
            "  to do:  copy the model, make another one for the copy, and load_state_dict()"
        )

    def _join(self, examples: int | None) -> bool:
        """Make the gradients those of the joined batch, and clip them. Collective.

        Returns:
            False if no rank had data: there is nothing to step along.
        """
        if not self.gradients.reduced and not self.gradients.reduce(examples):
            return False
        if self._max_norm is not None:
            clip([flat.buffer for flat in self.gradients.flats], self._max_norm)
        return True

    def _compression_state(self) -> dict[str, Any]:
        compressor = self.gradients.compressor
        return {} if compressor is None else {"compression": compressor.state_dict()}

    def _load_compression(self, state: dict[str, Any]) -> None:
        if self.gradients.compressor is not None and "compression" in state:
            self.gradients.compressor.load_state_dict(state["compression"])
