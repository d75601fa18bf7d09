"""Hangs that explain themselves: what each rank is doing, found out beside the network that hangs.

Each rank notes what it calls in memory that the other ranks of its node can read, also when it is
stopped, dead, or stuck in a loop. A thread on the first two ranks of each node reads those notes
and tells the root over a connection of its own; the root prints one verdict.
"""

from lockstep.watchdog.watch import mode, watched

__all__ = ["mode", "watched"]
