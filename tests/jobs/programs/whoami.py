"""Say who this process is."""

from __future__ import annotations

from collections.abc import Sequence

import lockstep


def main(argv: Sequence[str] | None = None) -> int:
    """Print rank and size."""
    world = lockstep.discover()
    print(f"rank {world.rank} of size {world.size}", flush=True)
    return 0


if __name__ == "__main__":
    lockstep.run(main)
