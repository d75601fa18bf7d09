"""Check the GPUs, where there are any: has every rank one of its own that computes?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from lockstep.devices import lacking
from lockstep.smoke.check import Check, Finding, Lab
from lockstep.smoke.compare import named, odd_ones


@dataclass(frozen=True)
class Facts:
    """The GPUs that a rank sees: identities and names, who reaches whose memory, does one sum."""

    ids: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    peers: bool = True
    sums: bool = True
    cuda: str = ""


class Gpus(Check):
    """Whether each rank sees a GPU of its own."""

    name = "gpus"
    question = "Does every rank see a GPU of its own, and do the GPUs of a node reach each other?"
    limit = 15.0

    def measure(self, lab: Lab) -> Facts:
        """Look at the GPUs, and let this rank's own add up numbers."""
        import torch

        if not torch.cuda.is_available():
            return Facts()
        count = torch.cuda.device_count()
        every = [torch.cuda.get_device_properties(i) for i in range(count)]
        own = lab.world.local_rank if count > 1 else 0
        right = True
        if own < count:
            right = torch.ones(1000, device=f"cuda:{own}").sum().item() == 1000.0
        pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
        return Facts(
            ids=tuple(str(it.uuid) for it in every),
            names=tuple(it.name for it in every),
            peers=all(torch.cuda.can_device_access_peer(i, j) for i, j in pairs),
            sums=right,
            cuda=torch.version.cuda or "",
        )

    def judge(self, answers: Mapping[int, Facts], lab: Lab) -> Finding:
        """Not applicable where no rank sees a GPU."""
        if not any(it.ids for it in answers.values()):
            return Finding("no rank sees a GPU", applicable=False)
        common, _ = odd_ones({rank: it.names for rank, it in answers.items()})
        found = Finding(f"{len(common)} a rank in view: {', '.join(sorted(set(common)))}")
        places = {rank: lab.roster[rank] for rank in sorted(answers)}
        everyone = [(it.node, it.local_rank, answers[rank].ids) for rank, it in places.items()]
        for rank, trouble in zip(places, lacking(everyone), strict=True):
            if trouble is not None:
                found.warn(f"{places[rank]}: {trouble.found}", trouble.cure)
        wrong = [rank for rank, it in answers.items() if it.ids and not it.sums]
        if wrong:
            found.fail(
                f"{named(wrong, lab.roster)}: the GPU adds up wrongly", "nvidia-smi -q; drain it"
            )
        far = [rank for rank, it in answers.items() if not it.peers]
        if far:
            found.warn(
                f"{named(far, lab.roster)}: GPUs of the node do not reach each other's memory",
                "nvidia-smi topo -m   # nccl then goes through the host's memory, which is slower",
            )
        found.details = {str(rank): asdict(it) for rank, it in answers.items()}
        return found
