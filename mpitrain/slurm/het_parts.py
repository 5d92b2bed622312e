"""The parts of a script for a heterogeneous job: servers on nodes of one partition, workers on those of another."""

EACH = """\
extra=()
on_each() { # HOSTS... -- COMMAND: one task of it on each, without MPI, in the component that the node belongs to
    local group hosts=() mine=()
    while [[ $1 != -- ]]; do hosts+=("$1"); shift; done
    shift
    for group in 0 1; do
        mapfile -t mine < <(printf '%s\\n' "${hosts[@]}" | grep -xF "$(components "$group")")
        if ((${#mine[@]})); then
            srun --mpi=none --het-group="$group" --nodes="${#mine[@]}" --ntasks="${#mine[@]}" --ntasks-per-node=1 \\
                --nodelist="$(IFS=,; echo "${mine[*]}")" --overlap "${extra[@]}" "$@" &
            wait_for $! # bash hears a signal at once while it waits, and not before the end of what it runs
        fi
    done
}
components() { # 0: the servers' nodes, 1: the workers', a line each
    if (($1)); then printf '%s\\n' "${WORKER_HOSTS[@]}"; else printf '%s\\n' "${SERVER_HOSTS[@]}"; fi
}
"""

NODES = """\
mapfile -t SERVER_HOSTS < <(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_0")
mapfile -t WORKER_HOSTS < <(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_1")
WORKERS=${WORKERS_PER_NODE:-${SLURM_GPUS_PER_NODE_HET_GROUP_1:-1}}
WORKERS=${WORKERS##*:} # "a100:4" is 4
"""

OUTLIVED = """\
# Before 24.05.4 the srun of a heterogeneous step may wait for ever when its ranks have ended: a race in Slurm's PMIx
# plugin. The result, which a run writes last, says how it ended.
RESULT=$RUN_DIR/result.json
outlived() {
    until [[ $RESULT -nt $RUN_DIR/hosts ]]; do sleep "${SRUN_LOOK_S:-10}"; done
    sleep "${SRUN_GRACE_S:-120}"
    echo "$RESULT was written ${SRUN_GRACE_S:-120} s ago and srun still waits: ended by this script" >&2
    pkill -KILL -P $$ -x srun
}
"""

BODY = """\
need_all_fit "${SERVER_HOSTS[@]}" "${WORKER_HOSTS[@]}"
stage_in "${SERVER_HOSTS[@]}" "${WORKER_HOSTS[@]}"
# The first component's nodes serve, the second's work.
"${MPITRAIN[@]}" train "$@" --dry-run --gpus-per-node "$WORKERS" --hosts "${SERVER_HOSTS[*]} ${WORKER_HOSTS[*]}" \\
    --server-nodes "${#SERVER_HOSTS[@]}" --write-hosts "$RUN_DIR/hosts"
servers=$(grep -cxF "$(printf '%s\\n' "${SERVER_HOSTS[@]}")" "$RUN_DIR/hosts")
workers=$((${#WORKER_HOSTS[@]} * WORKERS))
cores=${SLURM_JOB_CPUS_PER_NODE_HET_GROUP_1%%[(,]*} # "32(x4)" is 32
cores=$((cores / WORKERS > 0 ? cores / WORKERS : 1))
export MPITRAIN_SERVER_NODES=${#SERVER_HOSTS[@]} OMP_NUM_THREADS=${OMP_NUM_THREADS:-$cores}
rm -f "$RUN_DIR/REQUEUE"
rc=0
# srun makes one MPI world of both components, the first one's ranks lowest. mpirun cannot. It ends with any of them.
unset MPITRAIN_FT
train=("${DEAF[@]}" "${COPY[@]}" "${MPITRAIN[@]}" train "$@" --run-dir "$RUN_DIR" --resume auto)
outlived &
watch=$!
run "${LAUNCH[@]}" --kill-on-bad-exit=1 --unbuffered \\
    --nodes="${#SERVER_HOSTS[@]}" --ntasks="$servers" "${train[@]}" : \\
    --nodes="${#WORKER_HOSTS[@]}" --ntasks="$workers" --ntasks-per-node="$WORKERS" --cpus-per-task="$cores" \\
    "${BIND[@]}" "${train[@]}" || rc=$?
kill "$watch" 2>/dev/null || true
if ((rc == 137)) && [[ $RESULT -nt $RUN_DIR/hosts ]]; then
    rc=$(sed -n 's/^  "exit_code": \\([0-9]*\\),*$/\\1/p' "$RESULT")
fi
finish "$rc"
"""
