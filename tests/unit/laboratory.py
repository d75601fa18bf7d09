"""A laboratory without ranks, for what the checks of the smoke test make of their findings."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from lockstep.smoke.check import Finding, Lab, Options, Who
from lockstep.world import World


def lab_of(*per_node: int) -> Lab:
    """Return a laboratory of nodes with so many ranks each, as the root sees it."""
    size = sum(per_node)
    nodes = len(per_node)
    world = World(0, size, 0, per_node[0], 0, nodes, "node0", cast("Any", None))
    places = [(node, local) for node, ranks in enumerate(per_node) for local in range(ranks)]
    roster = {
        rank: Who(rank, f"node{node}", node, local, 1000 + rank)
        for rank, (node, local) in enumerate(places)
    }
    return Lab(world, Options(Path("/shared")), roster)


def texts(finding: Finding) -> str:
    """Return all that was found wrong."""
    return "\n".join(fault.found for fault in finding.faults)
