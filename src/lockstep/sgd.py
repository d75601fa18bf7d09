"""Synchronous SGD: N ranks on batches of b take the step that one rank takes on a batch of N·b.

The sum of the gradients over the ranks is written out in `lockstep.allreduce`, the buffers and
their order in `lockstep.gradients`; here are the step itself and what keeps the ranks equal.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from lockstep.checks import check_numbers
from lockstep.compress import Compression
from lockstep.flat import Flat, blocks
from lockstep.gradients import BUCKET_BYTES, Gradients, Options
from lockstep.in_step import InStep
from lockstep.replicas import divergence, equalize, own_group, share
from lockstep.world import World

__all__ = ["Synchronous", "SynchronousSGD", "divergence", "synchronous"]


class SynchronousSGD(InStep, torch.optim.Optimizer):
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
        allreduce: name of an algorithm, see `lockstep.allreduce.NAMES`; "auto" chooses.
        max_norm: clip the joined gradient to this norm; None without.
        broadcast_buffers: after each step, give all ranks the root's buffers (the statistics of
            BatchNorm), as DistributedDataParallel does.
        bucket_bytes: gradients are summed in pieces of this size.
        compress: send fewer bytes, such as "bf16", see `lockstep.compress`; None sends all.

    A parameter that no rank has used in a step gets a gradient of zeros, so that weight decay and
    momentum still move it, where torch.optim.SGD would leave it alone.

    Raises:
        ValueError: a number is out of range.
        LockstepError: on all ranks, if the model or a setting is not the same on all of them, or
            a named algorithm is not possible here.
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
        compress: Compression | str | None = None,
    ) -> None:
        check_numbers(lr, momentum, weight_decay, nesterov, max_norm)
        self._group = own_group()
        options = Options(allreduce, bucket_bytes, compress)
        said = f"lr={lr}, momentum={momentum}, weight_decay={weight_decay}, nesterov={nesterov}, "
        equalize(model, self._group, f"{said}max_norm={max_norm}, {options}")
        self.gradients = Gradients(model.parameters(), world, self._group, options)
        self._max_norm = max_norm
        self._buffers = list(model.buffers()) if broadcast_buffers else []
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(self.gradients.parameters, defaults | {"nesterov": nesterov})
        self._weights = [_move_together(flat, self.gradients) for flat in self.gradients.flats]
        self._momenta = [Flat(flat.views) for flat in self.gradients.flats]
        self._share_state()

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
        # The mean is taken in the same pass over the memory as the step, if nobody wants it before.
        divisor = 1
        if not self.gradients.reduced and self._max_norm is None:
            divisor = self.gradients.reduce(examples, mean=False)
        elif not self._join(examples):
            divisor = 0
        if not divisor:
            return  # no rank had data
        for weights, flat, momenta in zip(
            self._weights, self.gradients.flats, self._momenta, strict=True
        ):
            buffers = weights.buffer, flat.buffer, momenta.buffer
            for w, g, m in zip(*map(blocks, buffers), strict=True):
                _descend(w, g, m, divisor, self.param_groups[0])
        share(self._buffers, self._group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state: of the optimizer, momentum included, and of the compression. Local."""
        return super().state_dict() | self._compression_state()

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
        self._load_compression(state_dict)
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


class Synchronous(InStep):
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
        compress: Compression | str | None = None,
    ) -> None:
        self.optimizer = optimizer
        check_numbers(0.0, 0.0, 0.0, False, max_norm)
        self._group = own_group()
        self._max_norm = max_norm
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        options = Options(allreduce, bucket_bytes, compress)
        said = f"{_spell(optimizer)}, max_norm={max_norm}, {options}"
        whole = model if model is not None else nn.ParameterList(parameters)
        equalize(whole, self._group, said, parameters)
        self._buffers = list(model.buffers()) if model is not None else []
        self.gradients = Gradients(parameters, world, self._group, options)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's own parameter groups."""
        return self.optimizer.param_groups

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's own state, and that of the compression. Local."""
        return self.optimizer.state_dict() | self._compression_state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what state_dict() has given. Local."""
        self.optimizer.load_state_dict(state_dict)
        self._load_compression(state_dict)

    def step(self, *, examples: int | None = None) -> None:
        """Take the optimizer's step along the gradient of the joined batch. Collective.

        Args:
            examples: as for `SynchronousSGD.step`.
        """
        if self._join(examples):
            self.optimizer.step()
            share(self._buffers, self._group)


def synchronous(optimizer: torch.optim.Optimizer, world: World, **options: Any) -> Synchronous:
    """Put any torch optimizer in step on all ranks. Collective.

    Args:
        optimizer: with its parameters; they are made those of the root.
        world: the ranks.
        options: allreduce, max_norm, bucket_bytes, compress as for SynchronousSGD; model, if its
            buffers are to be made those of the root too, at the start and after each step.

    Returns:
        an object with zero_grad, backward, accumulate, reduce, step and close as SynchronousSGD
        has them. Learning rate schedules take its attribute ``optimizer``.
    """
    return Synchronous(optimizer, world, **options)


def _spell(optimizer: torch.optim.Optimizer) -> str:
    """Write down an optimizer's settings."""
    groups = [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    return f"{type(optimizer).__name__}({groups})"


def _descend(
    weights: torch.Tensor,
    gradient: torch.Tensor,
    momenta: torch.Tensor,
    divisor: int,
    numbers: dict[str, Any],
) -> None:
    """Take one step along flat buffers; the formula and the order of torch.optim.SGD."""
    if divisor != 1:
        gradient.div_(divisor)
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
