"""The rules of the house: direction of imports, sizes, docstrings."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from launching import ROOT

SOURCE = ROOT / "src" / "lockstep"
FILES = sorted(SOURCE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
JOBS = sorted((ROOT / "jobs").glob("*.py"))

# A module may import from its own row and those above it.
ROWS = [
    {"errors"},
    {"waiting", "ending", "launcher", "hostfile", "kernel", "pipeline", "notes", "files", "lock"}
    | {"ranges"},
    {"world"},
    {"launch", "mpi_backend", "shared_memory", "meeting", "rendezvous", "devices", "threads"}
    | {"spawn", "together", "interrupt", "progress", "tuning", "watchdog", "choice", "windows"}
    | {"midway"},
    {"allreduce", "reducers", "session", "spawned"},
    {"checks", "gradients", "replicas", "sgd", "in_step", "flat", "compress", "batchnorm"}
    | {"data", "models", "checkpoint"}
    | {"metrics", "settings", "schedules", "steps"},
    {"training", "journal", "logbook", "course", "proof", "hosts", "smoke", "bench"},
    {"report", "__main__"},
    {"__init__"},
]
ROW = {name: row for row, names in enumerate(ROWS) for name in names}


def name_of(path: Path) -> str:
    """Return the module, or the package, below lockstep that a file belongs to."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported(path: Path) -> Iterator[str]:
    """Return the modules of lockstep that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            pytest.fail(f"{path}:{node.lineno}: a relative import")
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "lockstep" and len(parts) > 1:
                # `from lockstep import World` takes a name of the package itself.
                is_module = (SOURCE / f"{parts[1]}.py").exists() or (SOURCE / parts[1]).is_dir()
                yield parts[1] if is_module else "__init__"


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return all functions of a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def short(path: Path) -> str:
    """Return a file's name for the report."""
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=short)
def test_imports_go_upwards(path: Path) -> None:
    """No module knows what is built on it."""
    name = name_of(path)
    assert name in ROW, f"give {name} a row in this test and in the design"
    # A module without a row fails in its own name, not in that of all who import it.
    wrong = [other for other in imported(path) if ROW.get(other, 0) > ROW[name]]
    assert not wrong, f"{name} imports {wrong}, which are below it"


def test_imports_go_in_no_circle() -> None:
    """Modules of one row may use each other, but not both ways."""
    uses: dict[str, set[str]] = {}
    for path in FILES:
        name = name_of(path)
        uses.setdefault(name, set()).update(set(imported(path)) - {name})

    def reach(name: str, seen: tuple[str, ...]) -> None:
        assert name not in seen, f"a circle: {' -> '.join((*seen, name))}"
        for other in uses.get(name, ()):
            reach(other, (*seen, name))

    for name in uses:
        reach(name, ())


@pytest.mark.parametrize("path", [*FILES, *TESTS], ids=short)
def test_modules_are_short(path: Path) -> None:
    """One idea a file."""
    assert len(path.read_text().splitlines()) < 300


@pytest.mark.parametrize("path", JOBS, ids=short)
def test_jobs_are_short(path: Path) -> None:
    """A job reads top to bottom."""
    assert len(path.read_text().splitlines()) <= 120


@pytest.mark.parametrize("path", [*FILES, *JOBS], ids=short)
def test_functions_are_short(path: Path) -> None:
    """Below 40 lines, docstring included."""
    long = {
        f.name: lines
        for f in functions(path)
        if (lines := (f.end_lineno or f.lineno) - f.lineno + 1) >= 40
    }
    assert not long


@pytest.mark.parametrize("path", FILES, ids=short)
def test_everything_public_has_a_docstring(path: Path) -> None:
    """Modules, classes and their methods, functions; what is inside of a function is its own."""
    tree = ast.parse(path.read_text())
    bare = [] if ast.get_docstring(tree) else ["the module"]
    bare += _without_docstring(tree)
    assert not bare


def _without_docstring(parent: ast.Module | ast.ClassDef) -> list[str]:
    found = []
    for node in parent.body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if node.name.startswith("_"):
            continue
        if not ast.get_docstring(node):
            found.append(node.name)
        if isinstance(node, ast.ClassDef):
            found += [f"{node.name}.{name}" for name in _without_docstring(node)]
    return found


def test_one_reader_of_the_launchers_variables() -> None:
    """Only launcher.py names them."""
    prefixes = ("OMPI_", "PMI_", "PMIX_", "SLURM_")
    for path in FILES:
        if path.name == "launcher.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not node.value.startswith(prefixes), f"{short(path)}:{node.lineno}"
