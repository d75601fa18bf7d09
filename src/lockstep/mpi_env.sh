# The one home of the environment variables that an MPI needs.
#
# The bin/activate that `make` builds reads this file with lockstep_mpi=on, its deactivate with
# lockstep_mpi=off. POSIX sh, so that bash, zsh, ksh and dash can read it. A variable that is
# already set is left alone; what is set here is noted in LOCKSTEP_MPI_ENV, to be undone.

_lockstep_undo() {
    while IFS='=' read -r _lockstep_name _lockstep_value; do
        if [ -n "$_lockstep_name" ]; then
            eval "_lockstep_now=\${$_lockstep_name-}"
            # another value is the user's, set since
            if [ "$_lockstep_now" = "$_lockstep_value" ]; then unset "$_lockstep_name"; fi
        fi
    done <<END
${LOCKSTEP_MPI_ENV-}
END
    _lockstep_now=${LD_LIBRARY_PATH-}
    case "${_lockstep_now%%:*}" in
    */lib/mpich-abi) # ours comes first, where nobody has put another before it
        LD_LIBRARY_PATH=${_lockstep_now#*/lib/mpich-abi}
        LD_LIBRARY_PATH=${LD_LIBRARY_PATH#:}
        if [ -z "$LD_LIBRARY_PATH" ]; then unset LD_LIBRARY_PATH; fi
        ;;
    esac
    unset LOCKSTEP_MPI_ENV _lockstep_name _lockstep_value _lockstep_now
}

_lockstep_default() { # NAME VALUE
    if eval "[ -z \"\${$1+set}\" ]"; then
        export "$1=$2"
        export LOCKSTEP_MPI_ENV="${LOCKSTEP_MPI_ENV-}$1=$2
"
    fi
}

_lockstep_set() {
    # Open MPI's mpirun refuses root until told twice; containers and CI run as root.
    if [ "$(id -u)" = 0 ]; then
        _lockstep_default OMPI_ALLOW_RUN_AS_ROOT 1
        _lockstep_default OMPI_ALLOW_RUN_AS_ROOT_CONFIRM 1
    fi

    # Open MPI refuses more ranks than cores. Allow them on a workstation or in a container, but
    # not in a batch job: the allocation says there how many ranks there may be, and with this
    # setting Open MPI 5 would not bind ranks to cores either. `slot` is needed: without it Open
    # MPI 5 puts all ranks on the first node of a hostfile. (First line Open MPI 5, second 4.
    # Neither needs mpi_yield_when_idle: Open MPI sets that by itself where ranks have no core
    # each, and where they have, it makes a small message half as slow again.)
    if [ -z "${SLURM_JOB_ID-}${PBS_JOBID-}${LSB_JOBID-}${PE_HOSTFILE-}" ]; then
        _lockstep_default PRTE_MCA_rmaps_default_mapping_policy slot:oversubscribe
        _lockstep_default OMPI_MCA_rmaps_base_oversubscribe 1
    fi

    # Open MPI carries no PATH to the other hosts of a hostfile: a bare `python` would be another
    # there. Only Open MPI 5 (it has prterun): with this list set, version 4 refuses every -x.
    if command -v prterun >/dev/null 2>&1; then
        _lockstep_default OMPI_MCA_mca_base_env_list PATH
    fi

    # Intel MPI's wheel has no vars.sh to set these.
    if [ -x "${VIRTUAL_ENV-}/bin/impi_info" ]; then
        _lockstep_default I_MPI_ROOT "$VIRTUAL_ENV"
        _lockstep_default FI_PROVIDER_PATH "$VIRTUAL_ENV/lib"
        # With more ranks than cores, its small message takes 3 ms, and 40 us with 3 (sleep when
        # idle). With a core for each rank, 3 costs about 1 us; so it is set only where the 4
        # ranks of the examples have no core each. (nproc would obey OMP_NUM_THREADS.)
        if [ "$(getconf _NPROCESSORS_ONLN)" -lt 4 ]; then
            _lockstep_default I_MPI_THREAD_YIELD 3
        fi
    fi

    # The cluster's own MPICH, where it has no libmpi.so.12: tools/venv.sh made a link.
    if [ -d "${VIRTUAL_ENV-}/lib/mpich-abi" ]; then
        export LD_LIBRARY_PATH="$VIRTUAL_ENV/lib/mpich-abi${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
    fi
}

_lockstep_undo
if [ "${lockstep_mpi-on}" = on ]; then _lockstep_set; fi
unset lockstep_mpi
unset -f _lockstep_undo _lockstep_default _lockstep_set
