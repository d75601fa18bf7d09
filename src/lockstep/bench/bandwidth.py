"""What is called bandwidth. Everything here is Local; bytes and seconds in, bytes a second out.

The definitions are those of NVIDIA's nccl-tests (doc/PERFORMANCE.md there), so that figures can be
compared: algorithm bandwidth is what the caller sees, bus bandwidth what a rank's link has to carry
for it, whatever the number of ranks and the algorithm are.
"""

from __future__ import annotations


def algorithm_bandwidth(nbytes: int, seconds: float) -> float:
    """Return bytes of the buffer a second.

    Args:
        nbytes: length of the buffer on one rank.
        seconds: that the call took.
    """
    return nbytes / seconds


def bus_bandwidth(nbytes: int, seconds: float, ranks: int) -> float:
    """Return the bytes a second that each rank sends, at least, in an all-reduce of that speed.

    Each of n ranks has to send 2(n-1)/n of its buffer and to receive as much; so this compares with
    the bandwidth of a link, and a single rank needs none.

    Args:
        nbytes: length of the buffer on one rank.
        seconds: that the call took.
        ranks: n.
    """
    return algorithm_bandwidth(nbytes, seconds) * 2 * (ranks - 1) / ranks
