"""Load a data set on all ranks; what is wrong on one is an error on all."""

from __future__ import annotations

from pathlib import Path

from lockstep.data import mnist, sample
from lockstep.data.images import Images
from lockstep.together import on_all
from lockstep.world import World

# Seconds; the slowest download that is still waited for.
LIMIT = 900.0
_DOING = "load the data"


def load(world: World, name: str, directory: Path) -> tuple[Images, Images]:
    """Return the images to train with and those to test with. Collective.

    Args:
        world: the ranks; each reads the files itself.
        name: "sample", the 4,000 + 1,000 digits that need no file, or "mnist", all 60,000 + 10,000.
        directory: where MNIST lies or is to be put, as `MNIST/raw/*`, the way torchvision does it.

    Raises:
        DataError: on all ranks alike, what is missing or wrong on any of them.
    """
    if name == "sample":
        return on_all(world, sample.load, _DOING)
    # One rank a node, and of several nodes that share the directory one: there is a lock.
    if world.local_rank == 0:
        on_all(world, lambda: mnist.fetch(directory, LIMIT), _DOING)
    else:
        on_all(world, lambda: None, _DOING)
    return on_all(world, lambda: mnist.load(directory), _DOING)
