"""Every launch of the table of launchers: what is announced, and what is refused.

The rows are what each launcher really leaves in the environment, 2 nodes with 2 ranks each.
"""

from __future__ import annotations

import pytest

from lockstep import launcher
from lockstep.launcher import Launch

OPENMPI = "Open MPI v5.0.11, package: Open MPI, ident: 5.0.11, repo rev: v5.0.11"
MPICH = "MPICH Version:      5.0.2\nMPICH Release date: unreleased"
INTEL = "Intel(R) MPI Library 2021.18 for Linux* OS\n"
LIBRARIES = {
    "openmpi": OPENMPI,
    "mpich": MPICH,
    "mpich, not told of PMIx": f"{MPICH}\nMPICH configure:    --with-device=ch4:ofi",
    "mpich, told of PMIx": f"{MPICH}\nMPICH configure:    --with-pmix=/usr",
    "intel": INTEL,
}

STEP = {
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
}
ENVIRONMENTS = {
    "nothing": {},
    "srun": STEP,
    "srun pmi2": {**STEP, "PMI_SIZE": "4", "PMI_RANK": "2"},
    "srun pmix": {**STEP, "PMIX_RANK": "2", "PMIX_NAMESPACE": "slurm.pmix.7.0"},
    "openmpi, first node": {
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_RANK": "2",
        "SLURM_NTASKS": "4",
        "PMIX_RANK": "2",
    },
    "openmpi, other node": {
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_RANK": "2",
        "SLURM_NTASKS": "1",
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_PROCID": "0",
        "PMIX_RANK": "2",
    },
    "mpich": {
        "PMI_SIZE": "4",
        "PMI_RANK": "2",
        "MPI_LOCALNRANKS": "2",
        "MPI_LOCALRANKID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_TASKS": "2",
    },
    "intel": {
        "PMI_SIZE": "4",
        "PMI_RANK": "2",
        "MPI_LOCALNRANKS": "2",
        "MPI_LOCALRANKID": "0",
        "SLURM_NTASKS": "4",
        "SLURM_STEP_NUM_TASKS": "2",
    },
    "batch script": {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"},
}
ANNOUNCED = {
    "nothing": ("none", 1, 0, ""),
    "srun": ("srun", 4, 2, "none"),
    "srun pmi2": ("srun", 4, 2, "pmi2"),
    "srun pmix": ("srun", 4, 2, "pmix"),
    "openmpi, first node": ("openmpi", 4, 2, ""),
    "openmpi, other node": ("openmpi", 4, 2, ""),
    "mpich": ("hydra", 4, 2, ""),
    "intel": ("hydra", 4, 2, ""),
    "batch script": ("none", 1, 0, ""),
}
# Launch, library, size that MPI then builds, what the cure must name; size 0: MPI_Init aborts.
BROKEN = [
    ("srun", "openmpi", 1, "--mpi=pmix"),
    ("srun", "mpich", 1, "--mpi=pmi2"),
    ("srun", "intel", 1, "--mpi=pmi2"),
    ("srun pmi2", "openmpi", 1, "--mpi=pmix"),
    ("srun pmix", "mpich", 1, "--mpi=pmi2"),
    ("srun pmix", "mpich, not told of PMIx", 0, "--mpi=pmi2"),
    ("srun pmix", "intel", 1, "--mpi=pmi2"),
    ("openmpi, first node", "mpich", 0, "belongs to MPICH"),
    ("openmpi, other node", "intel", 1, "belongs to Intel MPI"),
    ("mpich", "openmpi", 1, "belongs to Open MPI"),
    ("intel", "openmpi", 1, "belongs to Open MPI"),
]
GOOD = [
    ("nothing", "openmpi", 1),
    ("nothing", "mpich", 1),
    ("nothing", "intel", 1),
    ("srun pmi2", "mpich", 4),
    ("srun pmi2", "intel", 4),
    ("srun pmix", "openmpi", 4),
    ("srun pmix", "mpich, told of PMIx", 4),
    ("srun pmix", "intel", 4),
    ("openmpi, first node", "openmpi", 4),
    ("openmpi, other node", "openmpi", 4),
    ("mpich", "mpich", 4),
    ("intel", "intel", 4),
    ("batch script", "openmpi", 1),
]


def refusal(launch: Launch, library: str, size: int) -> launcher.Refusal | None:
    """Return what is said before MPI is started, or else after."""
    before = launcher.refuse_before_start(launch, library)
    return before or launcher.refuse_after_start(launch, library, size)


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_announced(name: str) -> None:
    """Kind, size, rank and PMI are read from the variables that tell the truth."""
    found = launcher.announced(ENVIRONMENTS[name])
    assert (found.kind, found.size, found.rank, found.pmi) == ANNOUNCED[name]
    if found.kind != "none":
        assert found.source in ENVIRONMENTS[name]


@pytest.mark.parametrize(("name", "library", "size", "cure"), BROKEN)
def test_broken_launches_are_refused(name: str, library: str, size: int, cure: str) -> None:
    """With what was announced, what was found, and what to do."""
    launch = launcher.announced(ENVIRONMENTS[name])
    if size == 0:
        assert launcher.refuse_before_start(launch, LIBRARIES[library]) is not None
    said = refusal(launch, LIBRARIES[library], size or 1)
    assert said is not None
    found, needed, to_do = said
    assert "announced 4 ranks" in found
    assert launch.source in found
    assert "size 1" in found
    assert needed
    assert cure in needed + to_do


@pytest.mark.parametrize(("name", "library", "size"), GOOD)
def test_good_launches_are_not(name: str, library: str, size: int) -> None:
    """Neither before nor after MPI has started."""
    assert refusal(launcher.announced(ENVIRONMENTS[name]), LIBRARIES[library], size) is None


@pytest.mark.parametrize("library", LIBRARIES)
def test_srun_of_one_task_is_a_good_world(library: str) -> None:
    """A single task needs no PMI."""
    alone = {**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}
    assert refusal(launcher.announced(alone), LIBRARIES[library], 1) is None


def test_a_world_of_another_size_is_refused() -> None:
    """Not only size 1: any size that differs."""
    launch = launcher.announced(ENVIRONMENTS["mpich"])
    said = launcher.refuse_after_start(launch, MPICH, 2)
    assert said is not None
    assert "size 2" in said[0]


@pytest.mark.parametrize("value", ["", "four", "-1", "4.0"])
def test_a_variable_that_is_no_number_counts_as_absent(value: str) -> None:
    """Variables are set by anybody."""
    assert launcher.announced({"PMI_SIZE": value}) == launcher.announced({})


@pytest.mark.parametrize(
    ("text", "family"),
    [
        (OPENMPI, "openmpi"),
        (MPICH, "mpich"),
        (INTEL, "intel"),
        ("MVAPICH2 Version      :\t2.3.7", "mpich"),
        ("MPI VERSION    : CRAY MPICH version 8.1.28.29 (ANL base 3.4a2)", "mpich"),
        ("something new", "other"),
    ],
)
def test_family(text: str, family: str) -> None:
    """Libraries that share an ABI and a way of starting are one family."""
    assert launcher.family(text) == family


def test_an_unknown_mpi_is_judged_by_its_size_only() -> None:
    """Nothing is known against it before it starts."""
    launch = launcher.announced(ENVIRONMENTS["openmpi, first node"])
    assert launcher.refuse_before_start(launch, "something new") is None
    assert launcher.refuse_after_start(launch, "something new", 1) is not None
    assert launcher.refuse_after_start(launch, "something new", 4) is None


def test_short_version() -> None:
    """Name and version, in a line without a comma."""
    assert launcher.short_version(OPENMPI) == "Open MPI v5.0.11"
    assert launcher.short_version(f"{MPICH}\0") == "MPICH Version: 5.0.2"
    assert launcher.short_version(INTEL) == "Intel(R) MPI Library 2021.18 for Linux* OS"


def test_who_takes_path_along() -> None:
    """Hydra always, Open MPI when told."""
    name = "OMPI_MCA_mca_base_env_list"
    assert launcher.carries_path("mpich", {})
    assert launcher.carries_path("intel", {})
    assert not launcher.carries_path("openmpi", {})
    assert not launcher.carries_path("openmpi", {name: "MY_PATH"})
    assert launcher.carries_path("openmpi", {name: "FOO;PATH"})
