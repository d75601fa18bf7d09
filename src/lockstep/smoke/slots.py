"""How many ranks a hostfile has room for: ``python -m lockstep.smoke.slots HOSTFILE``. Local."""

from __future__ import annotations

import sys
from pathlib import Path

from lockstep import hostfile
from lockstep.errors import LockstepError


def slots(path: Path) -> int:
    """Return the sum of the slots; a host without a number counts for one.

    Raises:
        HostfileError: the file cannot be read, with the line's number.
    """
    return sum(host.slots or 1 for host in hostfile.read(path))


if __name__ == "__main__":
    try:
        print(slots(Path(sys.argv[1])))
    except LockstepError as error:
        sys.exit(str(error))
