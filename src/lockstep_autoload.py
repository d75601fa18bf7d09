"""What torch calls when it is imported, where Lockstep is installed.

A module of its own, so that nothing of the package is imported where it is switched off.
"""

from __future__ import annotations

import os


def autoload() -> None:
    """Register the backend "mpi" in a script that never heard of Lockstep. Local.

    torch loads the entry points of the group ``torch.backends`` at its import. LOCKSTEP_AUTOLOAD=0
    switches this one off; ``import lockstep`` registers the backend all the same.
    """
    if os.environ.get("LOCKSTEP_AUTOLOAD", "1").lower() not in ("0", "no", "false", "off"):
        import lockstep  # noqa: F401  # its import registers the backend
