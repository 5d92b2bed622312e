"""The bash that the batch scripts are put together from, one constant a concern.

Invariants: nothing of a site (its modules, launcher, container and disks are `site.sh`'s), and no figure of a
node's shape (Slurm provides it). A script's pieces share these variables: RUN_DIR, HOSTS (the nodes to use, by name),
WORKERS (workers a node), MPITRAIN (how the command is called).
"""

START = """\
cd "${SLURM_SUBMIT_DIR:-.}"
signals=0 now=0
trap 'signals=$((signals + 1))' USR1 # heard when the script listens
trap 'signals=$((signals + 1)) now=1' TERM
# Modules, launcher, container, disks: the one file to edit. A line of it that fails ends the job at once, before good
# nodes are blamed for it; a line that may fail ends in `|| true`.
SITE=${MPITRAIN_SITE:-slurm/site.sh} where=
trap 'where=", line $LINENO: $BASH_COMMAND"' ERR
trap 'echo "$SITE: exit code $?$where: nothing was started" >&2; exit 2' EXIT
set -e
# shellcheck source=/dev/null
source "$SITE"
trap - ERR EXIT
export SLURM_EXPORT_ENV=ALL # srun hands on what this file has set, also where sbatch --export=NONE is the site's way
# large tensors lie in huge pages, on nodes that give them to who asks
[[ ${GLIBC_TUNABLES:-} == *hugetlb* ]] ||
    export GLIBC_TUNABLES=${GLIBC_TUNABLES:+$GLIBC_TUNABLES:}glibc.malloc.hugetlb=1
set -euo pipefail
ulimit -c 0 # many ranks' core files fill a file system
MPITRAIN=("${CONTAINER[@]}" mpitrain)
: "${LAUNCH[0]:?$SITE does not say how ranks start}"
"${MPITRAIN[@]}" --version || {
    echo "${MPITRAIN[*]} does not run on ${SLURMD_NODENAME:-this node} after $SITE: nothing was started" >&2
    exit 2
}
"""

RUN_DIR = """\
RUN_DIR=${RUN_DIR:-runs/$SLURM_JOB_NAME-$SLURM_JOB_ID} # the same after a requeue, which keeps the job id
(umask 077 && mkdir -p "$RUN_DIR") # for its owner alone
note() { # EVENT WORDS: a line for `mpitrain slurm status`
    printf '%(%s)T %s %s %s\\n' -1 "$SLURM_JOB_ID" "${SLURM_RESTART_COUNT:-0}" "$*" >>"$RUN_DIR/job.log"
}
note started "$SLURM_JOB_NODELIST"
# shellcheck disable=SC2317 # called by the trap
at_end() {
    local code=$?
    if declare -F unstage >/dev/null; then unstage || true; fi
    note ended "$code"
}
trap at_end EXIT
"""

NODES = """\
mapfile -t HOSTS < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
gpus_asked() { # GPUs a node that the job has asked for: the shell of an exclusive job sees all that its node has
    local asked=${SLURM_GPUS_PER_NODE:-}
    if [[ -z $asked && -n ${SLURM_GPUS:-} ]]; then # --gpus=8: of all nodes together
        asked=${SLURM_GPUS##*:}
        if ((asked % ${#HOSTS[@]})); then
            echo "--gpus=$asked does not go evenly into ${#HOSTS[@]} nodes: ask for --gpus-per-node" >&2
            exit 2
        fi
        asked=$((asked / ${#HOSTS[@]}))
    elif [[ -z $asked ]]; then # --gres=gpu:4
        asked=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/.*TresPerNode=//p' | tr ',' '\\n' | grep gpu || true)
    fi
    # "4", "a100:4", "gres:gpu:4" or several of them
    tr ',' '\\n' <<<"$asked" | awk -F '[:=/]' '{ n += $NF } END { print (n > 0 ? n : 1) }'
}
WORKERS=${WORKERS_PER_NODE:-$(gpus_asked)} # one a GPU
"""

# Signals go to the batch shell (--signal=B:) and from it to the launcher, which hands them to all ranks: that is one
# way for srun, mpirun and mpiexec. A signal that comes between two launches is not lost: `run` then starts nothing.
SIGNALS = """\
# Near the time limit, or before a preemption: ranks checkpoint at the next step, write REQUEUE and leave with 75.
child=0 heard=0
# shellcheck disable=SC2317 # called by the trap, where a bare return is the code of what was interrupted
on_signal() {
    heard=$((heard + 1))
    if put_off; then return 0; fi
    signals=$((signals + 1))
    if ((child)); then # again and again, because a rank that is still importing does not listen yet
        (while kill -USR1 "$child" 2>/dev/null; do sleep 5; done) &
    else
        nothing_runs
    fi
}
listen() {
    trap on_signal USR1
    trap 'now=1; on_signal' TERM
    if ((signals)); then
        if put_off; then signals=0; else nothing_runs; fi
    fi
}
wait_for() { # PROCESS: its exit code, once it has ended; a signal, also one before it, has a wait return early
    local seen rc
    while kill -0 "$1" 2>/dev/null; do wait "$1" || true; done
    while seen=$heard rc=0; do
        wait "$1" || true
        wait "$1" || rc=$?
        if ((seen == heard)); then return "$rc"; fi
    done
}
run() { # its exit code
    local rc=0
    note ranks
    "$@" &
    child=$!
    wait_for "$child" || rc=$?
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
        --nodelist="$(IFS=,; echo "${hosts[*]}")" --overlap "${extra[@]}" "$@" &
    wait_for $! # bash hears a signal at once while it waits, and not before the end of what it runs
}
"""

CHECK_NODES = """\
# Every node looks at itself, without MPI, so that one bad node cannot hang the check of the others. One that is gone
# takes the whole step with it: those that have not reported are asked again, each by a step of its own, all at once.
# Nodes that are unfit are measured once more before that ends anything.
check_nodes() { # HOSTS...: 0 if all are fit; else 4, with the others in $RUN_DIR/failing_nodes.txt
    local host reports=$RUN_DIR/doctor unfit=$RUN_DIR/failing_nodes.txt again=()
    listen
    note preflight
    rm -rf "$reports"
    mkdir -p "$reports"
    ask_nodes "$@"
    for host in "$@"; do
        if [[ ! -e $reports/$host.json ]]; then again+=("$host"); fi
    done
    ask_each "${again[@]}"
    if judge_nodes "$@"; then return 0; fi
    mapfile -t again <"$unfit"
    if ((${#again[@]} == 0)); then return 4; fi
    echo "measured again, before that ends anything: ${again[*]}"
    for host in "${again[@]}"; do rm -f "$reports/$host.json"; done
    ask_each "${again[@]}"
    judge_nodes "$@"
}
judge_nodes() { # HOSTS...
    "${MPITRAIN[@]}" doctor --collect "$reports" --hosts "$*" --failing "$unfit"
}
ask_each() { # HOSTS...
    local host asked=()
    for host in "$@"; do
        (ask_nodes "$host") &
        asked+=($!)
    done
    for host in "${asked[@]}"; do wait_for "$host" || true; done
}
ask_nodes() { # HOSTS...
    local extra=(--no-kill --time=5)
    on_each "$@" -- "${MPITRAIN[@]}" doctor --node --report "$RUN_DIR/doctor" "${DOCTOR[@]}" || true
}
"""

ALL_FIT = """\
need_all_fit() { # HOSTS...
    check_nodes "$@" || {
        note unfit "$(paste -sd, "$RUN_DIR/failing_nodes.txt")"
        exit 4
    }
}
"""

# The variable is set on the ranks' own command line, because not every launcher hands the environment on.
STAGE = """\
# Stage-in: one task a node copies packs (STAGE in site.sh) to the node's own disk, verified, before anything is timed;
# ranks then read the copy on their node wherever the job names the pack. The job's end removes it again, unless another
# job uses it or site.sh says KEEP_STAGED=1.
COPY=() staged_on=()
stage_in() { # HOSTS...
    local pack
    # shellcheck disable=SC2153 # STAGE is site.sh's
    for pack in "${STAGE[@]}"; do
        if [[ -n $pack ]]; then
            note staging "$pack"
            staged_on=("$@")
            on_each "$@" -- "${MPITRAIN[@]}" data stage "$pack" "$STAGE_TO" --user "job $SLURM_JOB_ID"
            COPY=(env "MPITRAIN_STAGED=$STAGE_TO")
        fi
    done
}
unstage() {
    local pack extra=(--time=2)
    if ((${KEEP_STAGED:-0} || ${#staged_on[@]} == 0)); then return 0; fi
    for pack in "${STAGE[@]}"; do
        if [[ -n $pack ]]; then
            on_each "${staged_on[@]}" -- "${MPITRAIN[@]}" data unstage "$pack" "$STAGE_TO" --user "job $SLURM_JOB_ID"
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
    local ranks nodes most code=0 fate=(--kill-on-bad-exit=1 --wait=60) out=(--unbuffered) log='' shown=0 shows
    ranks=$(wc -l <"$RUN_DIR/hosts")
    nodes=$(sort -u "$RUN_DIR/hosts" | wc -l)
    most=$(sort "$RUN_DIR/hosts" | uniq -c | sort -rn | awk 'NR == 1 { print $1 }')
    local cores=$((SLURM_CPUS_ON_NODE / most > 0 ? SLURM_CPUS_ON_NODE / most : 1))
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$cores} SRUN_CPUS_PER_TASK=$cores # srun no longer inherits it
    case ${LAUNCH[0]##*/} in
    srun) # GPUs by --gpus-per-node, the device by the rank's place on its node: --gpus-per-task would hide the
        # neighbours' GPUs and break copies between them
        export SLURM_HOSTFILE=$RUN_DIR/hosts
        if [[ -n ${MPITRAIN_FT:-} ]]; then
            fate=(--kill-on-bad-exit=0 --no-kill --wait=0)
        fi
        if ((nodes >= ${FILES_FROM_NODES:-64})); then # a file a node, and here what comes from rank 0's node
            mkdir -p "$RUN_DIR/output"
            log=$RUN_DIR/output/$(head -n 1 "$RUN_DIR/hosts").txt
            : >>"$log"
            out=(--output="$RUN_DIR/output/%N.txt" --open-mode=append)
            exec {shown}<"$log" # one place in the file for all that read here
            cat <&"$shown" >/dev/null # an earlier start's
            (while sleep 0.5; do cat <&"$shown"; done) &
            shows=$!
        fi
        run "${LAUNCH[@]}" --nodes="$nodes" --ntasks="$ranks" --distribution=arbitrary --cpus-per-task="$cores" \\
            --overlap "${fate[@]}" "${out[@]}" "${BIND[@]}" "$@" || code=$?
        if ((shown)); then
            kill "$shows" 2>/dev/null || true
            sleep 1
            cat <&"$shown"
            exec {shown}<&-
        fi
        # srun's code is that of the dead; a result from before this start's placement is another start's
        if [[ -n ${MPITRAIN_FT:-} && $RUN_DIR/result.json -nt $RUN_DIR/hosts ]]; then
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
    if [[ -e $RUN_DIR/REQUEUE ]]; then
        requeue
    elif (($1 == 75)); then
        requeue --not-started
    fi
    exit "$1"
}
requeue() { # [--not-started]: returns where the job may not run again, and where it was cancelled
    local job=$SLURM_JOB_ID # of the last task of an array it is the whole array's
    if [[ -n ${SLURM_ARRAY_JOB_ID:-} ]]; then job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID; fi
    "${MPITRAIN[@]}" slurm may-requeue "$RUN_DIR" --max-restarts "${MAX_RESTARTS:-20}" "$@" || return 0
    if ! scontrol show job "$job" | grep -q JobState=RUNNING; then
        echo "the job was cancelled, or Slurm itself requeues it" >&2
        return 0
    fi
    unstage || true
    note requeued
    exec scontrol requeue "$job"
}
# shellcheck disable=SC2317 # called by on_signal
nothing_runs() {
    trap '' USR1 TERM
    echo "asked to end while no ranks run" >&2
    requeue --not-started
    exit 75
}
"""

GUARD = """\
# The batch script runs on the first node. When that dies, --no-kill leaves the job running with no process in it, so
# two other nodes look after it, and have the job requeued once Slurm holds it for down.
# shellcheck disable=SC2016
GUARD=(bash -c 'trap "" USR1
    first=$1 out=$2 seen=0
    shift 2
    while sleep "${GUARD_S:-30}"; do
        if ! scontrol show node "$first" | grep -q "State=[^ ]*DOWN"; then seen=0; continue; fi
        if ((seen++ < 4 * SLURM_PROCID)); then continue; fi # one of them is enough, unless it has died, too
        exec >>"$out" 2>&1
        echo "the first node $first is down, and the batch script was on it"
        say() { printf "%(%s)T %s %s %s\\n" -1 "$SLURM_JOB_ID" "${SLURM_RESTART_COUNT:-0}" "$*" >>"$RUN_DIR/job.log"; }
        if "$@"; then
            say requeued "by $SLURMD_NODENAME: the first node $first is down"
            scontrol requeue "$SLURM_JOB_ID"
        else
            say ended 1
            scancel "$SLURM_JOB_ID"
        fi
    done' guard)
guard() { # HOSTS...
    local others
    mapfile -t others < <(printf '%s\\n' "$@" | grep -vxF "$SLURMD_NODENAME" | head -n 2)
    if ((${#others[@]} == 0)); then return 0; fi
    export RUN_DIR
    srun --mpi=none --nodes="${#others[@]}" --ntasks="${#others[@]}" --ntasks-per-node=1 --no-kill \\
        --nodelist="$(IFS=,; echo "${others[*]}")" --overlap --kill-on-bad-exit=0 --wait=0 \\
        "${GUARD[@]}" "$SLURMD_NODENAME" "$(readlink /proc/$$/fd/1)" \\
        "${MPITRAIN[@]}" slurm may-requeue "$RUN_DIR" --max-restarts "${MAX_RESTARTS:-20}" --node-died \\
        2>"$RUN_DIR/guard.err" &
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
least=${MIN_NODES:-$need} # fewer than needed: with fewer workers
guard "${HOSTS[@]}"
rm -f "$RUN_DIR/REQUEUE"
rc=1
for ((attempt = 1; attempt <= ${ATTEMPTS:-5}; attempt++)); do
    mapfile -t HOSTS < <(answering)
    if ! check_nodes "${HOSTS[@]}" && [[ ! -s $RUN_DIR/failing_nodes.txt ]]; then
        note unfit
        exit 4
    fi
    mapfile -t healthy < <(printf '%s\\n' "${HOSTS[@]}" | grep -vxFf "$RUN_DIR/failing_nodes.txt")
    if ((${#healthy[@]} < least)); then
        echo "attempt $attempt: ${#healthy[@]} healthy node(s), $least needed: ${healthy[*]}" >&2
        note unfit "$(paste -sd, "$RUN_DIR/failing_nodes.txt")"
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
# Blank lines and those that begin with # do not count.
lines() { grep -vE '^[[:space:]]*(#|$)' "$SWEEP"; }
mapfile -t options < <(lines | sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" | xargs -r printf '%s\\n')
if ((${#options[@]} == 0)); then
    echo "$SWEEP has no line for index $SLURM_ARRAY_TASK_ID: sbatch --array=0-$(($(lines | wc -l) - 1))" >&2
    exit 2
fi
set -- "$@" "${options[@]}"
RUN_DIR=${RUN_ROOT:-runs/$SLURM_JOB_NAME-$SLURM_ARRAY_JOB_ID}/$SLURM_ARRAY_TASK_ID
"""

SWEEP_JOB = """\
# The directory of a sweep, and ranks on each node. What this job itself has to note down stands apart from the runs.
SWEEP=$1 RANKS=${2:-}
RUN_DIR=$SWEEP/jobs/${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}-${SLURM_ARRAY_TASK_ID:-0}
"""

SWEEP_BODY = """\
need_all_fit "${HOSTS[@]}"
stage_in "${HOSTS[@]}"
for host in "${HOSTS[@]}"; do
    for ((rank = 0; rank < ${RANKS:-$WORKERS}; rank++)); do echo "$host"; done
done >"$RUN_DIR/hosts"
"""

SWEEP_RUN = """\
rc=0
launch "${DEAF[@]}" "${COPY[@]}" "${MPITRAIN[@]}" sweep --run-dir "$SWEEP" || rc=$?
finish "$rc"
"""

BENCHMARK_BODY = """\
nothing_runs() {
    echo "asked to end between two runs" >&2
    exit 75
}
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
