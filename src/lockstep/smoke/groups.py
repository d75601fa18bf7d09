"""Check torch.distributed: does each backend open, add up rightly, and train in step?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.errors import LockstepError
from lockstep.rendezvous.agree import gather
from lockstep.session import session
from lockstep.smoke.check import Check, Finding, Lab
from lockstep.smoke.compare import named
from lockstep.world import World

# Steps in float64 agree to rounding; a wrong sum is off by far more.
_CLOSE = 1e-10
_STEPS = 3
# Seconds that a backend has for a verb.
_VERB = 8.0


@dataclass(frozen=True)
class Facts:
    """For each backend "" or what is wrong; the largest differences of weights, relative."""

    backends: dict[str, str]
    ways: float
    ranks: float


class Groups(Check):
    """Whether each backend sums rightly, and DDP and the SGD by hand take the same step."""

    name = "torch"
    question = "Does each backend make a group and sum rightly, and is a step the same both ways?"
    limit = 30.0
    together = True

    def measure(self, lab: Lab) -> Facts:
        """Open each backend that is at hand, add up, and take steps over the first."""
        wrong, ways, ranks = {}, 0.0, 0.0
        for backend in backends(lab.world):
            with session(backend=backend, timeout=_VERB, quiet=True) as world:
                wrong[backend] = _sums(world, backend)
                if backend == "mpi":
                    ways, ranks = _steps(world)
        return Facts(wrong, ways, ranks)

    def judge(self, answers: Mapping[int, Facts], lab: Lab) -> Finding:
        """Every rank has to have every sum right."""
        first = answers[min(answers)]
        ways = max(it.ways for it in answers.values())
        apart = max(it.ranks for it in answers.values())
        found = Finding(
            f"{', '.join(first.backends)} sum rightly; DDP and SGD by hand differ by {ways:.1e}"
        )
        for backend in first.backends:
            wrong = {rank: it.backends[backend] for rank, it in answers.items()}
            bad = [rank for rank, text in wrong.items() if text]
            if bad:
                found.fail(
                    f"{backend}: {wrong[bad[0]]} on {named(bad, lab.roster)}",
                    f"mpirun -n 4 python -m pytest tests/mpi; or another --backend than {backend}",
                )
        if ways > _CLOSE or apart > 0.0:
            found.fail(
                f"{_STEPS} steps by DDP and by hand differ by {ways:.1e}, the ranks by {apart:.1e}",
                "compare the software check above: another torch or CPU on some rank?",
            )
        if found.faults:
            found.summary = found.faults[0].found
        found.details = {
            "backends": dict.fromkeys(first.backends, "right"),
            "difference_of_the_ways": ways,
            "difference_between_ranks": apart,
        }
        return found


def backends(world: World) -> list[str]:
    """Return the backends that every rank has, the same list on all. Collective."""
    import torch
    import torch.distributed as dist

    nccl = dist.is_nccl_available() and torch.cuda.device_count() >= world.local_size
    everywhere = all(gather(world, nccl))
    return ["mpi", "gloo", *(["nccl"] if everywhere else [])]


def _sums(world: World, backend: str) -> str:
    """Say what is wrong with a sum, a maximum and a broadcast; "" if nothing is. Collective."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else "cpu"
    total = world.size * (world.size + 1) // 2
    for dtype in (torch.float32, torch.float64, torch.int64):
        tensor = torch.arange(1000, dtype=dtype, device=device) * 0 + world.rank + 1
        dist.all_reduce(tensor)
        if not torch.equal(tensor, torch.full_like(tensor, total)):
            return f"the sum of {dtype} is {tensor[0].item():g}, {total} would be right"
    tensor = torch.tensor([float(world.rank)], device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    if tensor.item() != world.size - 1:
        return f"the maximum is {tensor.item():g}, {world.size - 1} would be right"
    tensor = torch.full((100,), float(world.rank), device=device)
    dist.broadcast(tensor, src=0)
    return "" if not tensor.any() else "a broadcast did not bring the root's values"


def _steps(world: World) -> tuple[float, float]:
    """Take steps by DDP and by hand from the same weights. Collective.

    Returns:
        the largest difference between the two ways, relative to the largest weight; and that
        between ranks.
    """
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from lockstep.sgd import SynchronousSGD, divergence

    torch.manual_seed(1)
    by_hand = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 5)).double()
    by_ddp = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 5)).double()
    by_ddp.load_state_dict(by_hand.state_dict())
    ddp = DistributedDataParallel(by_ddp)
    theirs = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    ours = SynchronousSGD(by_hand, world, lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(world.rank)
    for _ in range(_STEPS):
        x = torch.randn(8, 20, dtype=torch.float64, generator=generator)
        for model, sgd, step in ((ddp, theirs, {}), (by_hand, ours, {"examples": 8})):
            optimizer: Any = sgd
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step(**step)
    pairs = zip(by_hand.parameters(), by_ddp.parameters(), strict=True)
    ways = max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)
    if math.isnan(ways):
        raise LockstepError("a step has made weights that are no numbers")
    return ways, float(divergence(by_hand, world))
