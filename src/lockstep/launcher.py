"""What world the launcher announced: the only reader of the launchers' environment variables.

The variables tell how many ranks *should* be in the world before MPI has started. MPI alone tells
how many there *are*. When the two disagree, the launch is broken, typically into N worlds of one.

SLURM_NTASKS alone is never believed: it counts the allocation, not the step, and under an mpirun
inside of sbatch it differs from node to node. Everything here is Local and starts nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["openmpi", "hydra", "srun", "none"]
Family = Literal["openmpi", "mpich", "intel", "other"]
Refusal = tuple[str, str, str]

# What mpirun or the library itself leaves in the environment of a process that is a rank.
_LEFT = ("OMPI_COMM_WORLD_", "OMPI_UNIVERSE_", "PMI_", "PMIX_", "HYDI_", "HYDRA_", "MPI_LOCAL")

_NAMES: dict[str, str] = {
    "openmpi": "Open MPI",
    "mpich": "MPICH",
    "intel": "Intel MPI",
    "other": "an MPI unknown to Lockstep",
}


@dataclass(frozen=True)
class Launch:
    """The world as announced by the environment.

    Attributes:
        kind: who started this process: Open MPI's mpirun, the hydra mpirun of MPICH and Intel MPI,
            Slurm's srun, or nobody.
        size: the number of ranks announced (1 if nobody announced a number).
        rank: the rank announced for this process.
        source: the variable that says so, for messages.
        pmi: how srun offers to connect the ranks: "pmix", "pmi2" or "none"; "" elsewhere.
    """

    kind: Kind
    size: int
    rank: int
    source: str
    pmi: str = ""


def announced(environ: Mapping[str, str] = os.environ) -> Launch:
    """Return the world that the launcher announced. Local.

    The order is that of trust: OMPI_COMM_WORLD_SIZE, then PMI_SIZE, then SLURM_STEP_NUM_TASKS.
    """
    if (size := _number(environ, "OMPI_COMM_WORLD_SIZE")) is not None:
        rank = _number(environ, "OMPI_COMM_WORLD_RANK") or 0
        return Launch("openmpi", size, rank, "OMPI_COMM_WORLD_SIZE")
    step = _number(environ, "SLURM_STEP_NUM_TASKS")
    if (size := _number(environ, "PMI_SIZE")) is not None:
        rank = _number(environ, "PMI_RANK") or 0
        if step is not None and not _started_by_hydra(environ):
            return Launch("srun", size, rank, "PMI_SIZE", "pmi2")
        return Launch("hydra", size, rank, "PMI_SIZE")
    if step is not None:
        pmi = "pmix" if "PMIX_RANK" in environ else "none"
        rank = _number(environ, "SLURM_PROCID") or 0
        return Launch("srun", step, rank, "SLURM_STEP_NUM_TASKS", pmi)
    return Launch("none", 1, 0, "no launcher's variable")


def announced_on_node(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return how many ranks the launcher says it has started on this node, None if it does not.

    Local.
    """
    for variable in ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"):
        if (size := _number(environ, variable)) is not None:
            return size
    # such as "2(x3)"; where nodes have different numbers it is a list, which only Slurm can read
    text = environ.get("SLURM_STEP_TASKS_PER_NODE", "").partition("(")[0]
    return int(text) if text.isdecimal() else None


def job_name(environ: Mapping[str, str] = os.environ) -> str:
    """Return a name of the batch job and of its restart, "local" outside of one. Local.

    It tells a reader whose a file is; it is not unique, since a job may hold several launches.
    """
    for variable in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID"):
        if job := environ.get(variable):
            restart = _number(environ, "SLURM_RESTART_COUNT")
            return job if restart is None else f"{job}-restart{restart}"
    return "local"


def allocation(environ: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """Return the nodes of the batch job and the tasks on each, as Slurm writes them. Local.

    Returns:
        such as ``"node[1-3]", "2(x3)"``; two empty texts outside of a job.
    """
    tasks = environ.get("SLURM_TASKS_PER_NODE") or environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    return environ.get("SLURM_JOB_NODELIST", ""), tasks


def interface_setting(kind: Family, environ: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """Return how an MPI is told which network to use, and what it is told now. Local.

    Returns:
        what to type, with ``{}`` for the interface's name, and the value that is set; two empty
        texts for an MPI that finds the network by itself.
    """
    if kind == "openmpi":
        value = environ.get("OMPI_MCA_btl_tcp_if_include", "")
        return "export OMPI_MCA_btl_tcp_if_include={}", value
    if kind == "intel":
        return "export FI_TCP_IFACE={}", environ.get("FI_TCP_IFACE", "")
    return "", ""


def carries_path(kind: Family, environ: Mapping[str, str] = os.environ) -> bool:
    """Say whether a launcher gives the ranks on other hosts the PATH of this one. Local."""
    if kind == "openmpi":
        return "PATH" in environ.get("OMPI_MCA_mca_base_env_list", "").split(";")
    return kind in ("mpich", "intel")


def without_launch(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return an environment for a launcher of our own, without what another one has left. Local.

    A process that starts MPI without a launcher gets some of these variables from its library.
    """
    return {name: value for name, value in environ.items() if not name.startswith(_LEFT)}


def short_version(library_version: str) -> str:
    """Return name and version out of a text of ``MPI.Get_library_version()``. Local."""
    first = library_version.strip("\0 \n").partition("\n")[0].partition(",")[0]
    return " ".join(first.strip("\0 ").split())


def family(library_version: str) -> Family:
    """Return which MPI a text of ``MPI.Get_library_version()`` belongs to. Local.

    Cray's MPICH and MVAPICH count as MPICH: they share its ABI and its way of starting.
    """
    text = library_version.lower()
    if "open mpi" in text:
        return "openmpi"
    if "intel" in text:
        return "intel"
    return "mpich" if "mpich" in text or "mvapich" in text else "other"


def refuse_before_start(launch: Launch, library: str) -> Refusal | None:
    """Say why MPI must not even be started, or None if it may. Local.

    Some libraries abort inside of MPI_Init under the wrong launcher, with a riddle and without
    giving Python a chance, so those cases have to be told from the environment.

    Returns:
        what was found, what is needed, what to do.
    """
    kind = family(library)
    if launch.kind == "openmpi" and kind in ("mpich", "intel"):
        return _wrong_family(launch, kind, library)
    if launch.kind == "hydra" and kind == "openmpi":
        return _wrong_family(launch, kind, library)
    if launch.kind == "srun" and launch.pmi == "none" and launch.size > 1 and kind != "other":
        return _no_pmi(launch, kind)
    if launch.kind == "srun" and launch.pmi == "pmix" and _built_without_pmix(library):
        return _no_pmi(launch, kind)
    return None


def refuse_after_start(launch: Launch, library: str, size: int) -> Refusal | None:
    """Say why the world that MPI built is not the one announced, or None if it is. Local.

    Args:
        size: the true size of the communicator.
    """
    if size == launch.size or launch.kind == "none":
        return None
    kind = family(library)
    if launch.kind == "srun":
        return _no_pmi(launch, kind, size)
    return _wrong_family(launch, kind, library, size)


def _wrong_family(launch: Launch, kind: Family, library: str, size: int = 1) -> Refusal:
    starter = (
        "Open MPI's mpirun" if launch.kind == "openmpi" else "the mpirun of MPICH or Intel MPI"
    )
    own = _NAMES[kind] if kind != "other" else library.splitlines()[0][:60]
    found = (
        f"broken launch: {starter} announced {launch.size} ranks ({launch.source}), but the MPI "
        f"library in this Python is {own}: each rank would be alone (world size {size})"
    )
    needed = "mpirun and library of the same MPI"
    venv = {"mpich": ".venv-mpich", "intel": ".venv-impi"}.get(kind, ".venv")
    cure = (
        f"start with the mpirun that belongs to {own} (of a venv: `. {venv}/bin/activate`; "
        "of a cluster: the module that mpi4py's libmpi comes from), "
        "or choose the other library: `make setup MPI=openmpi|mpich|impi|system`. "
        "`which -a mpirun` and `python -m mpi4py --mpi-lib-version` show both"
    )
    return found, needed, cure


def _no_pmi(launch: Launch, kind: Family, size: int = 1) -> Refusal:
    offered = f"--mpi={launch.pmi}" if launch.pmi else "its default --mpi"
    found = (
        f"broken launch: srun announced {launch.size} ranks ({launch.source}), but with {offered} "
        f"{_NAMES[kind]} leaves each rank alone (world size {size})"
    )
    wanted = {"openmpi": "pmix", "mpich": "pmi2", "intel": "pmi2"}.get(kind, "pmix")
    needed = f"srun --mpi={wanted} for {_NAMES[kind]}"
    cure = (
        f"`srun --mpi={wanted} …` (or `export SLURM_MPI_TYPE={wanted}`); "
        "`srun --mpi=list` shows what this site offers; or mpirun inside of sbatch"
    )
    return found, needed, cure


def _built_without_pmix(library: str) -> bool:
    """MPICH tells its configure line; from 4.2 on it aborts in MPI_Init where it meets a PMIx."""
    return "mpich configure" in library.lower() and "pmix" not in library.lower()


def _started_by_hydra(environ: Mapping[str, str]) -> bool:
    """Hydra's proxies run under srun too; these are set by hydra and never by srun."""
    return "HYDI_CONTROL_FD" in environ or "MPI_LOCALNRANKS" in environ


def _number(environ: Mapping[str, str], name: str) -> int | None:
    value = environ.get(name, "")
    return int(value) if value.isdecimal() else None
