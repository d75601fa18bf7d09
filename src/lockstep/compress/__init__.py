"""Sums over the ranks with fewer bytes: rounded, of low rank, or of the largest numbers alone.

What a rank leaves out of a sum it keeps, and adds to the next one (error feedback), so that nothing
is lost but only late: over all steps, what was sent and what is kept add up to the gradients. All
ranks get the same bits. The ways, m the bytes of the gradients in float32, n the number of ranks:

- "bf16", "fp16": numbers of 16 bits; a rank sends (n-1)/n m bytes, half of what a ring sends.
- "powersgd": matrices as products of two thin ones; "powersgd:R" takes the rank R in place of 4.
- "topk": the largest numbers of each rank with their places, 1 % of them; "topk:S" takes the share
  S; a rank sends 2 S m bytes to each other one.

Where ranks share memory the plain sum is faster: this is for slow networks. Sources: in the files.
"""

from lockstep.compress.feedback import Bucket, Compressor
from lockstep.compress.hooks import ddp_hook
from lockstep.compress.make import NAMES, Compression, make, parse

__all__ = ["NAMES", "Bucket", "Compression", "Compressor", "ddp_hook", "make", "parse"]
