"""Measurements: each module is one, started by ``mpirun … python -m lockstep.bench.NAME``."""
