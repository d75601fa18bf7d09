"""Synchronous SGD: N ranks on batches of b take the step that one rank takes on a batch of N·b.

The sum of the gradients over the ranks is written out in `lockstep.allreduce`, the buffers and
their order in `lockstep.gradients`; here are the step itself and what keeps the ranks equal.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lockstep.checks import check_numbers
from lockstep.gradients import BUCKET_BYTES, Flat, Gradients, Options
from lockstep.replicas import clip, divergence, equalize, own_group, share
from lockstep.world import World

__all__ = ["Synchronous", "SynchronousSGD", "divergence", "synchronous"]


class SynchronousSGD(torch.optim.Optimizer):
    """SGD in step on all ranks; momentum, Nesterov and weight decay are those of torch.optim.SGD.

    Making it is Collective: it checks that the model is the same on all ranks and gives all of them
    the root's parameters and buffers. Parameters and gradients then live in flat buffers; move the
    model to its device, dtype and memory format before.

    It is a torch.optim.Optimizer with one parameter group, so that learning rate schedules work.

    Args:
        model: its parameters that require gradients are trained.
        world: the ranks, from `lockstep.session`.
        lr: learning rate, above or equal to 0.
        momentum: 0 without.
        weight_decay: L2 penalty.
        nesterov: Nesterov momentum; needs momentum.
        allreduce: name of an algorithm of `lockstep.allreduce`.
        max_norm: clip the joined gradient to this norm; None without.
        broadcast_buffers: after each step, give all ranks the root's buffers (the statistics of
            BatchNorm), as DistributedDataParallel does.
        bucket_bytes: gradients are summed in pieces of this size.

    Raises:
        ValueError: a number is out of range.
        LockstepError: on all ranks, if the model is not the same on all of them.
    """

    def __init__(
        self,
        model: nn.Module,
        world: World,
        *,
        lr: float,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        allreduce: str = "auto",
        max_norm: float | None = None,
        broadcast_buffers: bool = True,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        check_numbers(lr, momentum, weight_decay, nesterov, max_norm)
        self._group: Any = own_group()
        said = f"lr={lr}, momentum={momentum}, weight_decay={weight_decay}, nesterov={nesterov}, "
        said += f"allreduce={allreduce}, max_norm={max_norm}, bucket_bytes={bucket_bytes}"
        equalize(model, self._group, said)
        options = Options(allreduce, bucket_bytes)
        self.gradients = Gradients(model.parameters(), world, self._group, options)
        self._max_norm = max_norm
        self._buffers = list(model.buffers()) if broadcast_buffers else []
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(self.gradients.parameters, defaults | {"nesterov": nesterov})
        self._weights = [_move_together(flat, self.gradients) for flat in self.gradients.flats]
        self._momenta = [Flat(flat.views) for flat in self.gradients.flats]
        self._share_state()

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

    @torch.no_grad()
    def step(  # type: ignore[override]  # torch's has a closure, which makes no sense in step
        self, closure: None = None, *, examples: int | None = None
    ) -> None:
        """Take the step of the joined batch. Collective.

        Args:
            closure: not supported; there for learning rate schedules, which look at the signature.
            examples: local batch size, 0 allowed, if loss.backward() was called and not backward()
                of this object.

        Raises:
            ValueError: examples is missing, or zero_grad() was not called since the last step.
        """
        self._require_parameters()
        if not _join(self.gradients, examples, self._max_norm):
            return
        numbers = self.param_groups[0]
        for weights, flat, momenta in zip(
            self._weights, self.gradients.flats, self._momenta, strict=True
        ):
            _descend(weights.buffer, flat.buffer, momenta.buffer, numbers)
        share(self._buffers, self._group)

    def close(self) -> None:
        """Let go of the model, stop the thread and close the group. Collective.

        A program that makes one SGD need not; one that makes many should.
        """
        self.gradients.close()
        dist.destroy_process_group(self._group)

    def _require_parameters(self) -> None:
        views = (view for flat in self._weights for view in flat.views)
        for parameter, view in zip(self.gradients.in_order(), views, strict=True):
            if parameter.data_ptr() != view.data_ptr():
                raise ValueError(
                    f"a parameter {list(parameter.shape)} has been moved or replaced since this "
                    "SGD was made, so that a step would change nothing\n"
                    "  needed: the parameters it was made with\n"
                    "  to do:  load, move or convert the model first, then make the SGD"
                )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse a second group: the parameters share one flat buffer."""
        if self.param_groups:
            raise ValueError(
                "SynchronousSGD has one parameter group\n"
                "  needed: all parameters from the start\n"
                "  to do:  use synchronous(torch.optim.SGD(groups, …), world)"
            )
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state that state_dict() has given, momentum included. Local."""
        super().load_state_dict(state_dict)
        for parameter, view in self._momentum_views():
            loaded = self.state[parameter].get("momentum_buffer")
            if loaded is None:
                view.zero_()
            else:
                view.copy_(loaded)
        self._share_state()

    def _momentum_views(self) -> Iterable[tuple[nn.Parameter, torch.Tensor]]:
        views = [view for flat in self._momenta for view in flat.views]
        return zip(self.gradients.in_order(), views, strict=True)

    def _share_state(self) -> None:
        for parameter, view in self._momentum_views():
            self.state[parameter]["momentum_buffer"] = view


class Synchronous:
    """Any torch optimizer, in step on all ranks; see `synchronous`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        world: World,
        *,
        allreduce: str = "auto",
        model: nn.Module | None = None,
        max_norm: float | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.optimizer = optimizer
        self._group: Any = own_group()
        self._max_norm = max_norm
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        equalize(model if model is not None else nn.ParameterList(parameters), self._group)
        self._buffers = list(model.buffers()) if model is not None else []
        options = Options(allreduce, bucket_bytes)
        self.gradients = Gradients(parameters, world, self._group, options)

    communication_seconds = SynchronousSGD.communication_seconds
    zero_grad = SynchronousSGD.zero_grad
    backward = SynchronousSGD.backward
    accumulate = SynchronousSGD.accumulate
    reduce = SynchronousSGD.reduce

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's own parameter groups."""
        return self.optimizer.param_groups

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's own state. Local."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the optimizer's own state. Local."""
        self.optimizer.load_state_dict(state_dict)

    def step(self, *, examples: int | None = None) -> None:
        """Take the optimizer's step along the gradient of the joined batch. Collective.

        Args:
            examples: as for `SynchronousSGD.step`.
        """
        if not _join(self.gradients, examples, self._max_norm):
            return
        self.optimizer.step()
        share(self._buffers, self._group)


def synchronous(optimizer: torch.optim.Optimizer, world: World, **options: Any) -> Synchronous:
    """Put any torch optimizer in step on all ranks. Collective.

    Args:
        optimizer: with its parameters; they are made those of the root.
        world: the ranks.
        options: allreduce, max_norm, bucket_bytes as for SynchronousSGD; model, if its buffers are
            to be made those of the root too, at the start and after each step.

    Returns:
        an object with zero_grad, backward, accumulate, reduce and step as SynchronousSGD has them.
        Learning rate schedules take its attribute ``optimizer``.
    """
    return Synchronous(optimizer, world, **options)


def _join(gradients: Gradients, examples: int | None, max_norm: float | None) -> bool:
    """Make the gradients those of the joined batch, and clip them. Collective.

    Returns:
        False if no rank had data: there is nothing to step along.
    """
    if not gradients.reduced and not gradients.reduce(examples):
        return False
    if max_norm is not None:
        clip([flat.buffer for flat in gradients.flats], max_norm)
    return True


def _descend(
    weights: torch.Tensor, gradient: torch.Tensor, momenta: torch.Tensor, numbers: dict[str, Any]
) -> None:
    """Take one step along flat buffers; the formula and the order of torch.optim.SGD."""
    lr, momentum, decay = numbers["lr"], numbers["momentum"], numbers["weight_decay"]
    direction = gradient.add(weights, alpha=decay) if decay else gradient
    if momentum:
        momenta.mul_(momentum).add_(direction)
        direction = direction.add(momenta, alpha=momentum) if numbers["nesterov"] else momenta
    weights.add_(direction, alpha=-lr)


def _move_together(flat: Flat, gradients: Gradients) -> Flat:
    """Move parameters into a flat buffer like that of their gradients."""
    members = gradients.members_of(flat)
    together = Flat([p.detach() for p in members])
    for parameter, view in zip(members, together.views, strict=True):
        view.copy_(parameter.detach())
        parameter.data = view
    return together
