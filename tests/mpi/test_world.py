"""Who am I, asked on every rank."""

from __future__ import annotations

import dataclasses

import pytest
from mpi4py import MPI

import lockstep
from lockstep import World


def test_the_world_is_that_of_the_communicator(world: World) -> None:
    """Rank and size are MPI's; asked again it is the same object."""
    assert (world.rank, world.size) == (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
    assert lockstep.discover() is world
    everyone = world.comm.allgather((world.rank, world.node, world.local_rank, world.host))
    assert [rank for rank, *_ in everyone] == list(range(world.size))
    assert len({(node, local) for _, node, local, _ in everyone}) == world.size


def test_one_host_is_one_node(world: World) -> None:
    """These tests run on one host: local numbers are the global ones."""
    assert (world.node, world.nodes) == (0, 1)
    assert (world.local_rank, world.local_size) == (world.rank, world.size)
    assert f"rank {world.rank} of {world.size}" in str(world)


def test_the_communicator_is_our_own(world: World) -> None:
    """A message of the user's with the same tag does not meet one of Lockstep's."""
    assert MPI.Comm.Compare(world.comm, MPI.COMM_WORLD) == MPI.CONGRUENT


def test_it_is_frozen(world: World) -> None:
    """Nobody can change who they are."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        world.rank = 5  # type: ignore[misc]


def test_a_world_of_part_of_the_ranks(world: World, comm: MPI.Intracomm) -> None:
    """discover(comm) answers for that communicator and leaves the world of all alone."""
    part = comm.Split(color=world.rank % 2, key=-world.rank)
    assert isinstance(part, MPI.Intracomm)
    theirs = lockstep.discover(part)
    assert (theirs.rank, theirs.size) == (part.rank, part.size)
    assert lockstep.discover() is world
    theirs.comm.Free()
    part.Free()
