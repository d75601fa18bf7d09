"""Point to point: the first lesson. Pass tensors between ranks, four ways. Root is rank 0.

To start it: mpirun -np 4 python jobs/ptdist.py [--backend gloo]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import lockstep
from lockstep import World
from lockstep.errors import SettingsError, counted
from lockstep.files import write_text
from lockstep.metrics import done_already
from lockstep.settings import flag, parse


@dataclass(frozen=True)
class Settings:
    backend: str = flag("mpi", "what carries the messages", ("mpi", "gloo"))
    timeout: float = flag(60.0, "seconds until a message that gets no answer is an error")
    largest: int = flag(4 * 2**20, "bytes of the longest message of the ping-pong")
    run: Path | None = flag(None, "directory that gets a DONE at the end")  # noqa: RUF009

    def __post_init__(self) -> None:
        if not (0 < self.timeout < 1e6 and 4 <= self.largest <= 2**31):
            raise SettingsError("needed: --timeout above 0, --largest from 4 to 2147483648")


def blocking(world: World) -> None:
    """Send from the root to every other rank; send and recv return when the tensor is theirs."""
    if world.rank == 0:
        for peer in range(1, world.size):
            dist.send(torch.tensor([1.0, -1.0]), dst=peer)
    else:
        got = torch.zeros(2)
        dist.recv(got, src=0)
        say(world, f"send/recv: got {got.tolist()} from rank 0")


def non_blocking(world: World) -> None:
    """Do the same with isend and irecv: they return at once, and the tensor is ours after wait."""
    if world.rank == 0:
        for work in [dist.isend(torch.tensor([1.0, -1.0]), peer) for peer in range(1, world.size)]:
            work.wait()  # type: ignore[union-attr]  # None only outside of the group
    else:
        got = torch.zeros(2)
        dist.irecv(got, src=0).wait()  # type: ignore[union-attr]
        say(world, f"isend/irecv: got {got.tolist()} from rank 0")


def ring(world: World) -> None:
    """Pass a token from rank to rank until it is back at the root; each rank adds one."""
    token = torch.zeros(1, dtype=torch.int64)
    left, right = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    if world.rank == 0:
        dist.send(token + 1, dst=right)
        dist.recv(token, src=left)
        say(world, f"ring: the token is back and has visited {token.item()} ranks")
    else:
        dist.recv(token, src=left)
        say(world, f"ring: the token came from rank {left} with {token.item()}")
        dist.send(token + 1, dst=right)


def ping_pong(world: World, largest: int) -> None:
    """Send messages there and back between rank 0 and the last rank; time half a round trip."""
    if (peer := {0: world.size - 1, world.size - 1: 0}.get(world.rank)) is None:
        return
    if world.rank == 0:
        print(f"ping-pong with rank {peer}:\n{'bytes':>10} {'latency µs':>12} {'MB/s':>10}")
    for size in [4 * 16**power for power in range(8) if 4 * 16**power <= largest]:
        message, trips = torch.zeros(size, dtype=torch.uint8), 200 if size <= 2**16 else 20
        for trip in range(-trips // 4, trips):  # the trips before 0 are to warm up
            if trip == 0:
                start = time.perf_counter()
            if world.rank == 0:
                dist.send(message, dst=peer)
                dist.recv(message, src=peer)
            else:
                dist.recv(message, src=peer)
                dist.send(message, dst=peer)
        one_way = (time.perf_counter() - start) / trips / 2
        if world.rank == 0:
            print(f"{size:>10} {one_way * 1e6:>12.1f} {size / one_way / 1e6:>10.1f}", flush=True)


def say(world: World, text: str) -> None:
    print(f"rank {world.rank} of {world.size} on {world.host}: {text}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    settings = parse(Settings, argv, __doc__)
    if lockstep.discover().size < 2:
        sys.stderr.write("found 1 rank; needed: 2 or more; to do: mpirun -np 4 python …\n")
        return 2
    with lockstep.session(backend=settings.backend, timeout=settings.timeout) as world:
        if done_already(world, settings.run):
            return 0
        if world.rank == 0:
            print(f"{settings}, {world.size} ranks on {counted(world.nodes, 'node')}", flush=True)
        blocking(world)
        non_blocking(world)
        ring(world)
        dist.barrier()
        ping_pong(world, settings.largest)
    if settings.run and world.rank == 0:
        write_text(settings.run / "DONE", "")  # all have left the session, so all went well
    return 0


if __name__ == "__main__":
    lockstep.run(main)
