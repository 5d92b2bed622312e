"""The bash that the batch scripts are put together from, one constant a concern.

Invariants: nothing of a site (its modules, launcher, container and disks are `site.sh`'s), and no figure of a
node's shape (Slurm provides it). A script's pieces share these variables: RUN_DIR, HOSTS (the nodes to use, by name),
WORKERS (workers a node), MPITRAIN (how the command is called).
"""

START = """\
cd "${SLURM_SUBMIT_DIR:-.}"
# shellcheck source=/dev/null
source "${MPITRAIN_SITE:-slurm/site.sh}" # modules, launcher, container, disks: the one file to edit
set -euo pipefail
ulimit -c 0 # many ranks' core files fill a file system
MPITRAIN=("${CONTAINER[@]}" mpitrain)
"""

RUN_DIR = """\
RUN_DIR=${RUN_DIR:-runs/$SLURM_JOB_NAME-$SLURM_JOB_ID} # the same after a requeue, which keeps the job id
(umask 077 && mkdir -p "$RUN_DIR") # for its owner alone
"""

NODES = """\
mapfile -t HOSTS < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
WORKERS=${WORKERS_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}} # one a GPU
"""

# Signals go to the batch shell (--signal=B:) and from it to the launcher, which hands them to all ranks: that is one
# way for srun, mpirun and mpiexec. A signal that comes between two launches is not lost: `run` then starts nothing.
SIGNALS = """\
# Near the time limit, or before a preemption: ranks checkpoint at the next step, write REQUEUE and leave with 75.
signals=0 child=0
# shellcheck disable=SC2317 # called by the trap
on_signal() {
    signals=$((signals + 1))
    # again and again, because a rank that is still importing does not listen yet
    if ((child)); then (while kill -USR1 "$child" 2>/dev/null; do sleep 5; done) & fi
}
trap on_signal USR1 TERM
run() { # its exit code; a wait that a signal has interrupted is taken up again
    local seen rc=0
    if ((signals)); then return 75; fi
    "$@" &
    child=$!
    while seen=$signals; do
        rc=0
        wait "$child" || rc=$?
        if ((seen == signals)); then break; fi
    done
    child=0
    return "$rc"
}
"""

EACH = """\
extra=()
on_each() { # HOSTS... -- COMMAND: one task of it on each, without MPI
    local hosts=()
    while [[ $1 != -- ]]; do hosts+=("$1"); shift; done
    shift
    srun --mpi=none --nodes="${#hosts[@]}" --ntasks="${#hosts[@]}" --ntasks-per-node=1 \\
        --nodelist="$(IFS=,; echo "${hosts[*]}")" --overlap "${extra[@]}" "$@"
}
"""

HET_EACH = """\
extra=()
on_each() { # HOSTS... -- COMMAND: one task of it on each, without MPI, in the component that the node belongs to
    local group hosts=() mine=()
    while [[ $1 != -- ]]; do hosts+=("$1"); shift; done
    shift
    for group in 0 1; do
        mapfile -t mine < <(printf '%s\\n' "${hosts[@]}" | grep -xF "$(components "$group")")
        if ((${#mine[@]})); then
            srun --mpi=none --het-group="$group" --nodes="${#mine[@]}" --ntasks="${#mine[@]}" --ntasks-per-node=1 \\
                --nodelist="$(IFS=,; echo "${mine[*]}")" --overlap "${extra[@]}" "$@"
        fi
    done
}
components() { # 0: the servers' nodes, 1: the workers', a line each
    if (($1)); then printf '%s\\n' "${WORKER_HOSTS[@]}"; else printf '%s\\n' "${SERVER_HOSTS[@]}"; fi
}
"""

CHECK_NODES = """\
# Every node looks at itself, without MPI, so that one bad node cannot hang the check of the others. Those that have
# not reported are asked once more one by one: a node that is gone takes the whole step with it.
check_nodes() { # HOSTS...: 0 if all are fit; else 4, with the others in $RUN_DIR/failing_nodes.txt
    local host reports=$RUN_DIR/doctor
    rm -rf "$reports"
    mkdir -p "$reports"
    ask_nodes "$@"
    for host in "$@"; do
        if [[ ! -e $reports/$host.json ]]; then ask_nodes "$host"; fi
    done
    "${MPITRAIN[@]}" doctor --collect "$reports" --hosts "$*" --failing "$RUN_DIR/failing_nodes.txt"
}
ask_nodes() { # HOSTS...
    local extra=(--no-kill --time=5)
    on_each "$@" -- "${MPITRAIN[@]}" doctor --node --report "$RUN_DIR/doctor" "${DOCTOR[@]}" || true
}
"""

ALL_FIT = """\
need_all_fit() { # HOSTS...
    check_nodes "$@" || {
        echo "unfit nodes; again without them: sbatch --exclude=$(paste -sd, "$RUN_DIR/failing_nodes.txt") ..." >&2
        exit 4
    }
}
"""

# The variable is set on the ranks' own command line, because not every launcher hands the environment on.
STAGE = """\
# Stage-in: one task a node copies packs (STAGE in site.sh) to the node's own disk, verified, before anything is timed;
# ranks then read the copy on their node wherever the job names the pack.
COPY=()
stage_in() { # HOSTS...
    local pack
    # shellcheck disable=SC2153 # STAGE is site.sh's
    for pack in "${STAGE[@]}"; do
        if [[ -n $pack ]]; then
            on_each "$@" -- "${MPITRAIN[@]}" data stage "$pack" "$STAGE_TO"
            COPY=(env "MPITRAIN_STAGED=$STAGE_TO")
        fi
    done
}
"""

# A file with each rank's node is understood by srun, mpirun and mpiexec alike, says exactly where servers and workers
# start, and makes "all nodes but one" or "the first four" no special case.
PLACE = """\
# Which rank starts where follows from the nodes, their GPUs and the strategy: this prints it, refuses what cannot
# run before any rank starts, and writes each rank's node into $RUN_DIR/hosts.
place() { # HOSTS... -- train's arguments
    local hosts=()
    while [[ $1 != -- ]]; do hosts+=("$1"); shift; done
    shift
    "${MPITRAIN[@]}" train "$@" --dry-run --gpus-per-node "$WORKERS" --hosts "${hosts[*]}" \\
        --write-hosts "$RUN_DIR/hosts"
}
"""

DEAF = """\
# Ranks ignore the signal until they listen to it: its default would kill one that has not come so far.
# shellcheck disable=SC2016
DEAF=(bash -c 'trap "" USR1; exec "$@"' rank)
"""

LAUNCH = """\
launch() { # runs its arguments as the ranks of $RUN_DIR/hosts
    local ranks nodes most code=0 fate=(--kill-on-bad-exit=1 --wait=60)
    ranks=$(wc -l <"$RUN_DIR/hosts")
    nodes=$(sort -u "$RUN_DIR/hosts" | wc -l)
    most=$(sort "$RUN_DIR/hosts" | uniq -c | sort -rn | awk 'NR == 1 { print $1 }')
    local cores=$((SLURM_CPUS_ON_NODE / most > 0 ? SLURM_CPUS_ON_NODE / most : 1))
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$cores} SRUN_CPUS_PER_TASK=$cores # srun no longer inherits it
    case ${LAUNCH[0]##*/} in
    srun) # GPUs by --gpus-per-node, the device by the rank's place on its node: --gpus-per-task would hide the
        # neighbours' GPUs and break CUDA IPC
        export SLURM_HOSTFILE=$RUN_DIR/hosts
        if [[ ${MPITRAIN_FT:-} == heartbeat ]]; then
            fate=(--kill-on-bad-exit=0 --no-kill --wait=0)
            rm -f "$RUN_DIR/result.json"
        fi
        run "${LAUNCH[@]}" --nodes="$nodes" --ntasks="$ranks" --distribution=arbitrary --cpus-per-task="$cores" \\
            --overlap "${fate[@]}" --unbuffered "${BIND[@]}" "$@" || code=$?
        if [[ ${MPITRAIN_FT:-} == heartbeat && -e $RUN_DIR/result.json ]]; then # srun's code is that of the dead
            code=$(sed -n 's/^ *"exit_code": \\([0-9]*\\),*$/\\1/p' "$RUN_DIR/result.json")
        fi
        return "$code"
        ;;
    mpirun) run "${LAUNCH[@]}" -n "$ranks" --hostfile "$RUN_DIR/hosts" "${BIND[@]}" "$@" ;;
    *) run "${LAUNCH[@]}" -n "$ranks" -f "$RUN_DIR/hosts" "${BIND[@]}" "$@" ;;
    esac
}
"""

FINISH = """\
# The marker decides, not the exit code, which srun blurs. The same job runs again unless it has done so
# MAX_RESTARTS times, or has made no progress since the last time.
finish() { # exit code of the run
    local again=("${MPITRAIN[@]}" slurm may-requeue "$RUN_DIR" --max-restarts "${MAX_RESTARTS:-20}")
    if [[ -e $RUN_DIR/REQUEUE ]] && "${again[@]}"; then
        exec scontrol requeue "$SLURM_JOB_ID"
    fi
    exit "$1"
}
"""

TRAIN = """\
rm -f "$RUN_DIR/REQUEUE"
rc=0
launch "${DEAF[@]}" "${COPY[@]}" "${MPITRAIN[@]}" train "$@" --run-dir "$RUN_DIR" --resume auto || rc=$?
finish "$rc"
"""

SIMPLE_BODY = """\
need_all_fit "${HOSTS[@]}"
stage_in "${HOSTS[@]}"
place "${HOSTS[@]}" -- "$@"
"""

TOLERANT_BODY = """\
# One node of the allocation is a spare. A node that dies ends the step, not the job (--no-kill): look at the nodes
# again, start on the healthy ones, from the last checkpoint. ATTEMPTS bounds it.
need=$((${#HOSTS[@]} - ${SPARE_NODES:-1}))
rm -f "$RUN_DIR/REQUEUE"
rc=1
for ((attempt = 1; attempt <= ${ATTEMPTS:-5}; attempt++)); do
    mapfile -t HOSTS < <(answering)
    check_nodes "${HOSTS[@]}" || true
    mapfile -t healthy < <(printf '%s\\n' "${HOSTS[@]}" | grep -vxFf "$RUN_DIR/failing_nodes.txt")
    if ((${#healthy[@]} < need)); then
        echo "attempt $attempt: ${#healthy[@]} healthy node(s), $need needed: ${healthy[*]}" >&2
        exit 4
    fi
    healthy=("${healthy[@]:0:need}")
    echo "attempt $attempt on ${healthy[*]}"
    stage_in "${healthy[@]}"
    place "${healthy[@]}" -- "$@"
    rc=0
    launch "${DEAF[@]}" "${COPY[@]}" "${MPITRAIN[@]}" train "$@" --run-dir "$RUN_DIR" --resume auto || rc=$?
    if ((rc == 0 || rc == 2 || rc == 3 || signals)) || [[ -e $RUN_DIR/REQUEUE ]]; then break; fi
    echo "attempt $attempt ended with $rc" >&2
done
finish "$rc"
"""

ANSWERING = """\
answering() { # the allocation's nodes that Slurm does not hold for dead
    scontrol show hostnames "$SLURM_JOB_NODELIST" | while read -r host; do
        if ! scontrol show node "$host" | grep -qE 'State=\\S*(DOWN|NOT_RESPONDING|\\*)'; then echo "$host"; fi
    done
}
"""

SWEEP_OPTIONS = """\
# Line SLURM_ARRAY_TASK_ID (from 0) of the sweep file: the options of this run, quoted as in a shell.
SWEEP=$1
shift
mapfile -t options < <(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" "$SWEEP" | xargs -r printf '%s\\n')
if ((${#options[@]} == 0)); then
    echo "$SWEEP has no line for index $SLURM_ARRAY_TASK_ID: sbatch --array=0-$(($(wc -l <"$SWEEP") - 1))" >&2
    exit 2
fi
set -- "$@" "${options[@]}"
RUN_DIR=${RUN_ROOT:-runs/$SLURM_JOB_NAME-$SLURM_ARRAY_JOB_ID}/$SLURM_ARRAY_TASK_ID
"""

BENCHMARK_BODY = """\
need_all_fit "${HOSTS[@]}"
STEPS=${STEPS:-200}
# 1, 2, 4, ... and all nodes of the allocation, one run each, one after the other.
for ((count = 1; ; count *= 2)); do
    ((count < ${#HOSTS[@]})) || count=${#HOSTS[@]}
    place "${HOSTS[@]:0:count}" -- "$@" --synthetic --steps "$STEPS"
    launch "${MPITRAIN[@]}" train "$@" --synthetic --steps "$STEPS" --run-dir "$RUN_DIR/nodes-$count"
    ((count < ${#HOSTS[@]})) || break
done
"""

HET_NODES = """\
mapfile -t SERVER_HOSTS < <(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_0")
mapfile -t WORKER_HOSTS < <(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_1")
WORKERS=${WORKERS_PER_NODE:-${SLURM_GPUS_PER_NODE_HET_GROUP_1:-1}}
WORKERS=${WORKERS##*:} # "a100:4" is 4
"""

HET_BODY = """\
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
run "${LAUNCH[@]}" --kill-on-bad-exit=1 --unbuffered \\
    --nodes="${#SERVER_HOSTS[@]}" --ntasks="$servers" "${train[@]}" : \\
    --nodes="${#WORKER_HOSTS[@]}" --ntasks="$workers" --ntasks-per-node="$WORKERS" --cpus-per-task="$cores" \\
    "${BIND[@]}" "${train[@]}" || rc=$?
finish "$rc"
"""
