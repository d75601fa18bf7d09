"""Meeting points for torch.distributed that need more than MPI: a file, a TCP port, variables.

`meet` opens one by what the user wrote, which `parse` reads:

- ``tcp``: a free port of the root, at an address that every host has reached, announced over MPI.
- ``tcp://HOST:PORT``: that port of the root's host.
- ``env``: MASTER_ADDR and MASTER_PORT where they are set; RANK, WORLD_SIZE and LOCAL_RANK, if they
  are set, have to be MPI's; what is not set is filled in while the session is open.
- ``file:///shared/directory``: a fresh file in that directory for every start, removed at the end;
  the directory is tested from every rank before. If locks do not hold across the hosts there,
  torch's FileStore would corrupt its file, and ``tcp`` is used instead.
- ``file!:///shared/directory``: the file in any case.

`choose_interface` sees to it that gloo uses a network that all hosts share. `open_store` opens a
TCP port without being told where.
"""

from lockstep.rendezvous.gloo import choose_interface
from lockstep.rendezvous.meet import Place, meet, parse
from lockstep.rendezvous.tcp import open_store

__all__ = ["Place", "choose_interface", "meet", "open_store", "parse"]
