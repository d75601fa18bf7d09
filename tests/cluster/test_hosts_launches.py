"""The commands of README over several hosts, as a reader types them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hosts_fixtures import Hosts
from launching import ROOT, launcher, need

LIMIT = 120.0
# `make` builds a bin/activate that reads mpi_env.sh; for environments built otherwise, again.
ACTIVATE = f'. "$0/bin/activate"; . {ROOT}/src/lockstep/mpi_env.sh; exec "$@"'


@pytest.mark.parametrize(
    ("name", "spelling", "words"),
    [
        ("openmpi", "openmpi", ["mpirun", "--hostfile"]),
        ("mpich", "mpich", ["mpiexec", "-f"]),
        ("impi", "intel", ["mpiexec.hydra", "-machinefile"]),
    ],
)
def test_a_bare_python(
    hosts: Hosts, tmp_path: Path, name: str, spelling: str, words: list[str]
) -> None:
    """`python` is that of the activated environment on every host, whatever PATH is there."""
    venv = need(name).venv
    login = hosts.run(hosts.names[0], "ssh", hosts.names[1], "echo $PATH")
    assert str(venv) not in login, "the host's own PATH finds that Python anyway"
    file = hosts.hostfile(spelling, hosts.names[:2])
    job = ["-n", "2", "python", "jobs/ptdist.py", "--largest", "4096"]
    command = ["bash", "-c", ACTIVATE, venv, *words, file, *job]
    outcome = hosts.start(command, tmp_path).finish(LIMIT)
    assert outcome.code == 0, outcome
    for rank, host in enumerate(hosts.names[:2]):
        assert f"rank {rank} of 2 on {host}" in outcome.text, outcome


def test_variables_of_the_user_are_taken_too(hosts: Hosts, tmp_path: Path) -> None:
    """Open MPI's -x beside the list that the environment sets."""
    file = hosts.hostfile("openmpi", hosts.names[:2])
    show = ["sh", "-c", 'echo "$LAB_WORD $(command -v python)"']
    command = ["mpirun", "--hostfile", file, "-n", "2", "-x", "LAB_WORD=here", *show]
    venv = launcher("openmpi").venv
    outcome = hosts.start(["bash", "-c", ACTIVATE, venv, *command], tmp_path).finish(LIMIT)
    assert outcome.text.count(f"here {need('openmpi').python}") == 2, outcome
