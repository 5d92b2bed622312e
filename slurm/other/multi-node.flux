#!/bin/bash
# Train on several nodes: workers on the GPUs, servers on the cores beside them.
#
#   flux batch slurm/other/multi-node.flux jobs/digits.py --strategy 'async(servers=2)'
#
# Your site's ways are in slurm/site.sh; options of the command before the script replace those below.
# Written by `mpitrain slurm render --set system=flux`, which also fills in job, nodes and limits.
# It has not run under Flux so far, but with stand-ins for its commands.

# flux: --job-name=mpitrain --time-limit=240m
# flux: --output=mpitrain-{{id}}.out
# flux: --nodes=2 --exclusive

JOB_ID=$(flux job id --to=dec "$FLUX_ENCLOSING_ID") JOB_NAME=mpitrain
signals=0
trap 'signals=$((signals + 1))' USR1 TERM # heard when the script listens
# Modules, launcher, container, disks: the one file to edit. A line of it that fails ends the job at once, before good
# nodes are blamed for it; a line that may fail ends in `|| true`.
SITE=${MPITRAIN_SITE:-slurm/site.sh} where=
trap 'where=", line $LINENO: $BASH_COMMAND"' ERR
trap 'echo "$SITE: exit code $?$where: nothing was started" >&2; exit 2' EXIT
set -e
# shellcheck source=/dev/null
source "$SITE"
trap - ERR EXIT
# large tensors lie in huge pages, on nodes that give them to who asks
[[ ${GLIBC_TUNABLES:-} == *hugetlb* ]] ||
    export GLIBC_TUNABLES=${GLIBC_TUNABLES:+$GLIBC_TUNABLES:}glibc.malloc.hugetlb=1
set -euo pipefail
ulimit -c 0 # many ranks' core files fill a file system
MPITRAIN=("${CONTAINER[@]}" mpitrain)
: "${LAUNCH[0]:?$SITE does not say how ranks start}"
"${MPITRAIN[@]}" --version || {
    echo "${MPITRAIN[*]} does not run on this node after $SITE: nothing was started" >&2
    exit 2
}

case $(command -v "${LAUNCH[0]}") in
*/srun)
    echo "$SITE starts ranks by srun, and this is no job of Slurm:" \
        "mpitrain slurm site --launcher flux" >&2
    exit 2
    ;;
*/pals/*) LAUNCHER=${LAUNCHER:-pals} ;; # HPE Cray's mpiexec
*) LAUNCHER=${LAUNCHER:-${LAUNCH[0]##*/}} ;;
esac
unset MPITRAIN_FT # heartbeat needs srun
environment() { # Open MPI hands its own variables to other hosts and no others
    local name
    for name in PATH LD_LIBRARY_PATH PYTHONPATH OMP_NUM_THREADS GLIBC_TUNABLES HDF5_USE_FILE_LOCKING ${!MPITRAIN_*}; do
        if [[ -v $name ]]; then printf '%s\n' -x "$name"; fi
    done
}

: "${1:?usage: flux batch slurm/other/multi-node.flux JOB.py [options of mpitrain train]}"
ARGUMENTS=("$@")

RUN_DIR=${RUN_DIR:-runs/$JOB_NAME-$JOB_ID}
(umask 077 && mkdir -p "$RUN_DIR") # for its owner alone
note() { # EVENT WORDS: a line for `mpitrain slurm status`
    printf '%(%s)T %s %s %s\n' -1 "$JOB_ID" "0" "$*" >>"$RUN_DIR/job.log"
}
note started
# shellcheck disable=SC2317 # called by the trap
at_end() {
    local code=$?
    if declare -F unstage >/dev/null; then unstage || true; fi
    note ended "$code"
}
trap at_end EXIT

read -ra HOSTS < <(flux hostlist --expand instance)
WORKERS=${WORKERS_PER_NODE:-4} # one a GPU

# Near the time limit, or before a preemption: ranks checkpoint at the next step, write REQUEUE and leave with 75.
child=0 heard=0
# shellcheck disable=SC2317 # called by the trap, where a bare return is the code of what was interrupted
on_signal() {
    heard=$((heard + 1))
    signals=$((signals + 1))
    if ((child)); then # again and again, because a rank that is still importing does not listen yet
        (while kill -USR1 "$child" 2>/dev/null; do sleep 5; done) &
    else
        nothing_runs
    fi
}
listen() {
    trap on_signal USR1 TERM
    if ((signals)); then nothing_runs; fi
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

seconds_left() {
    local left
    left=$(flux job timeleft) || return 0
    if [[ $left =~ ^[0-9] ]]; then echo "${left%%.*}"; fi
}
# Flux sends no signal to a batch script before its limit: a timer does.
left=$(seconds_left)
if [[ -n $left ]] && ((left > 300)); then
    (
        for ((left -= 300; left > 0; left -= 10)); do
            sleep $((left < 10 ? left : 10))
            kill -0 $$ 2>/dev/null || exit 0
        done
        kill -USR1 $$
    ) </dev/null >/dev/null 2>&1 & # whoever reads the job's output need not wait for it
fi

extra=()
on_each() { # HOSTS... -- COMMAND: one task of it on each, without MPI
    local each=$RUN_DIR/each-$1 options=() hosts=()
    while [[ $1 != -- ]]; do hosts+=("$1"); shift; done
    shift
    printf '%s\n' "${hosts[@]}" >"$each"
    case $LAUNCHER in
    flux) options=(--nodes="${#hosts[@]}" --exclusive --requires="host:$(IFS=,; echo "${hosts[*]}")") ;;
    pals) options=(--ppn 1 --hostfile "$each") ;;
    mpirun)
        mapfile -t options < <(environment)
        options+=(--map-by ppr:1:node --hostfile "$each")
        ;;
    *) options=(-ppn 1 -f "$each") ;;
    esac
    "${extra[@]}" "${LAUNCH[@]}" -n "${#hosts[@]}" "${options[@]}" "$@" &
    wait_for $! # bash hears a signal at once while it waits, and not before the end of what it runs
}

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
        if [[ ! -e $reports/$host.json && ! -e $reports/${host%%.*}.json ]]; then again+=("$host"); fi
    done
    ask_each "${again[@]}"
    if judge_nodes "$@"; then return 0; fi
    mapfile -t again <"$unfit"
    if ((${#again[@]} == 0)); then return 4; fi
    echo "measured again, before that ends anything: ${again[*]}"
    for host in "${again[@]}"; do rm -f "$reports/$host.json" "$reports/${host%%.*}.json"; done
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
    local extra=(timeout 300)
    on_each "$@" -- "${MPITRAIN[@]}" doctor --node --report "$RUN_DIR/doctor" "${DOCTOR[@]}" || true
}

# Which rank starts where follows from the nodes, their GPUs and the strategy: this prints it, refuses what cannot
# run before any rank starts, and writes each rank's node into $RUN_DIR/hosts.
place() { # HOSTS... -- train's arguments
    local hosts=()
    while [[ $1 != -- ]]; do hosts+=("$1"); shift; done
    shift
    "${MPITRAIN[@]}" train "$@" --dry-run --gpus-per-node "$WORKERS" --hosts "${hosts[*]}" \
        --write-hosts "$RUN_DIR/hosts"
}

launch() { # runs its arguments as the ranks of $RUN_DIR/hosts
    local ranks nodes most options=()
    ranks=$(wc -l <"$RUN_DIR/hosts")
    nodes=$(sort -u "$RUN_DIR/hosts" | wc -l)
    most=$(sort "$RUN_DIR/hosts" | uniq -c | sort -rn | awk 'NR == 1 { print $1 }')
    local cores=$(($(nproc) / most > 0 ? $(nproc) / most : 1))
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$cores}
    case $LAUNCHER in
    flux) # each rank sees all GPUs of its node, as everywhere
        options=(--nodes="$nodes" --exclusive --requires="host:$(sort -u "$RUN_DIR/hosts" | paste -sd,)")
        options+=(--taskmap="hostfile:$RUN_DIR/hosts" -o gpu-affinity=off)
        ;;
    pals) # puts as many ranks on each node, one node after the other
        uniq "$RUN_DIR/hosts" >"$RUN_DIR/hosts.once"
        if (($(wc -l <"$RUN_DIR/hosts.once") != nodes || ranks != nodes * most)); then
            echo "PALS starts equally many ranks on each node, in order, and the strategy wants others (see above):" \
                "take one without servers, or MPICH's own mpiexec" >&2
            return 2
        fi
        options=(--ppn "$most" --hostfile "$RUN_DIR/hosts.once")
        ;;
    mpirun)
        mapfile -t options < <(environment)
        options+=(--hostfile "$RUN_DIR/hosts" --oversubscribe) # the batch system counts slots, not ranks
        ;;
    *) options=(-f "$RUN_DIR/hosts") ;;
    esac
    run "${LAUNCH[@]}" -n "$ranks" "${options[@]}" "${BIND[@]}" "$@"
}

need_all_fit() { # HOSTS...
    check_nodes "$@" || {
        note unfit "$(paste -sd, "$RUN_DIR/failing_nodes.txt")"
        exit 4
    }
}

SCRIPT=$RUN_DIR/batch-script
if [[ $0 != "$SCRIPT" ]]; then cp "$0" "$SCRIPT"; fi

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
            on_each "$@" -- "${MPITRAIN[@]}" data stage "$pack" "$STAGE_TO" --user "job $JOB_ID"
            COPY=(env "MPITRAIN_STAGED=$STAGE_TO")
        fi
    done
}
unstage() {
    local pack extra=(timeout 120)
    if ((${KEEP_STAGED:-0} || ${#staged_on[@]} == 0)); then return 0; fi
    for pack in "${STAGE[@]}"; do
        if [[ -n $pack ]]; then
            on_each "${staged_on[@]}" -- "${MPITRAIN[@]}" data unstage "$pack" "$STAGE_TO" --user "job $JOB_ID"
        fi
    done
}

# The marker decides, not the exit code, which a launcher may blur. The same run goes on in another job, unless it has
# done so MAX_RESTARTS times, or has made no progress since the last time.
finish() { # exit code of the run
    if [[ -e $RUN_DIR/REQUEUE ]]; then
        requeue
    elif (($1 == 75)); then
        requeue --not-started
    fi
    exit "$1"
}
requeue() { # [--not-started]: returns where the run may not go on
    "${MPITRAIN[@]}" slurm may-requeue "$RUN_DIR" --max-restarts "${MAX_RESTARTS:-20}" "$@" || return 0
    unstage || true
    note requeued
    again
}
# shellcheck disable=SC2317 # called by on_signal
nothing_runs() {
    trap '' USR1 TERM
    echo "asked to end while no ranks run" >&2
    requeue --not-started
    exit 75
}
again() { # a job like this one, of the instance around this one, which goes on in the same run directory
    flux --parent batch --nodes="${#HOSTS[@]}" --dependency="afterany:$FLUX_ENCLOSING_ID" \
        --env=RUN_DIR="$RUN_DIR" "$SCRIPT" "${ARGUMENTS[@]}"
    exit 75
}

need_all_fit "${HOSTS[@]}"
stage_in "${HOSTS[@]}"
place "${HOSTS[@]}" -- "$@"
# Ranks ignore the signal until they listen to it: its default would kill one that has not come so far.
# shellcheck disable=SC2016
DEAF=(bash -c 'trap "" USR1; exec "$@"' rank)
rm -f "$RUN_DIR/REQUEUE"
rc=0
launch "${DEAF[@]}" "${COPY[@]}" "${MPITRAIN[@]}" train "$@" --run-dir "$RUN_DIR" --resume auto || rc=$?
finish "$rc"
