#!/usr/bin/env bash
# `make slurm-smoke`: submit the smoke and ptdist jobs to the Slurm that is here, wait for both, and
# say how they ended. Code 0 if both are done. LIMIT: seconds to wait, the queue included (900).
#     slurm/smoke-check.sh [OPTION OF SBATCH…]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
limit=${LIMIT:-900} bad=0 jobs=()
command -v sbatch >/dev/null || {
    echo "found no sbatch on PATH; needed: a login node of a Slurm cluster; do: module load slurm" >&2
    exit 1
}
site=${LOCKSTEP_SITE:-slurm/site.sh}
set +u # modules are not written for it
# shellcheck source=/dev/null
if [ -e "$site" ]; then . "$site"; fi
set -u
trap 'scancel "${jobs[@]}" 2>/dev/null || :' INT TERM

state() { scontrol show job -o "$1" 2>/dev/null | sed -n 's/.* JobState=\([A-Z_]*\).*/\1/p'; }

for name in smoke ptdist; do
    id=$(sbatch --parsable "$@" "slurm/$name.sbatch")
    jobs+=("${id%%;*}")
    echo "$name: job ${id%%;*}"
done
names=(smoke ptdist)
for i in 0 1; do
    id=${jobs[i]} verdict=
    while [ $SECONDS -lt "$limit" ]; do
        verdict=$(state "$id")
        case $verdict in PENDING | RUNNING | COMPLETING | CONFIGURING | SUSPENDED) sleep 1 ;; *) break ;; esac
    done
    log=$(scontrol show job -o "$id" | sed -n 's/.* StdOut=\([^ ]*\).*/\1/p')
    if [ "$verdict" = COMPLETED ] && grep -q "is DONE, code 0" "$log"; then
        echo "${names[i]}: good, log $log"
    else
        bad=1
        echo "${names[i]}: NOT good, ${verdict:-unknown to Slurm}; the end of $log:"
        tail -n 30 "$log" 2>/dev/null || echo "(it is not there)"
    fi
done
if [ $bad = 1 ]; then scancel "${jobs[@]}" 2>/dev/null || :; fi
exit $bad
