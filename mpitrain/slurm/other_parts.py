"""The bash of batch scripts for PBS Pro, LSF and Flux: what `script_parts.py` says for Slurm, in their words.

Invariants: the same functions and variables as there, so that the parts which know nothing of a batch system serve
all of them. JOB_ID and JOB_NAME stand for Slurm's variables; LAUNCHER says whose options LAUNCH takes. None of this has
run on such a system: tests run the scripts with stand-ins for its commands.
"""

# What a script for another system does instead of `START`'s first line, and before the site file is read.
HERE = {
    "pbs": """\
cd "${PBS_O_WORKDIR:-.}"
JOB_ID=${PBS_JOBID%%.*} JOB_NAME=$PBS_JOBNAME
""",
    "lsf": """\
cd "${LS_SUBCWD:-.}"
JOB_ID=$LSB_JOBID JOB_NAME=$LSB_JOBNAME
""",
    "flux": """\
JOB_ID=$(flux job id --to=dec "$FLUX_ENCLOSING_ID") JOB_NAME=@name@
""",
}

HOSTS = {
    "pbs": """mapfile -t HOSTS < <(awk '!seen[$1]++ { print $1 }' "$PBS_NODEFILE")\n""",
    "lsf": """mapfile -t HOSTS < <(awk '!seen[$1]++ { print $1 }' "$LSB_DJOB_HOSTFILE")\n""",
    "flux": """read -ra HOSTS < <(flux hostlist --expand instance)\n""",
}

LAUNCHER = """\
case $(command -v "${LAUNCH[0]}") in
*/srun)
    echo "$SITE starts ranks by srun, and this is no job of Slurm:" \\
        "mpitrain slurm site --launcher @launchers@" >&2
    exit 2
    ;;
*/pals/*) LAUNCHER=${LAUNCHER:-pals} ;; # HPE Cray's mpiexec
*) LAUNCHER=${LAUNCHER:-${LAUNCH[0]##*/}} ;;
esac
unset MPITRAIN_FT # heartbeat needs srun
environment() { # Open MPI hands its own variables to other hosts and no others
    local name
    for name in PATH LD_LIBRARY_PATH PYTHONPATH OMP_NUM_THREADS GLIBC_TUNABLES HDF5_USE_FILE_LOCKING ${!MPITRAIN_*}; do
        if [[ -v $name ]]; then printf '%s\\n' -x "$name"; fi
    done
}
"""

# Seconds that are left, or nothing if the system sets no limit, or sends a signal by itself.
LEFT = {
    "pbs": """\
seconds_left() { # the limit as PBS has it, which may differ from the one above
    local limit
    limit=$(qstat -f "$PBS_JOBID" 2>/dev/null | sed -n 's/.*Resource_List.walltime = //p')
    echo "${limit:-@time@}" | awk -F: '{ s = 0; for (i = 1; i <= NF; i++) s = 60 * s + $i; print s }'
}
""",
    "flux": """\
seconds_left() {
    local left
    left=$(flux job timeleft) || return 0
    if [[ $left =~ ^[0-9] ]]; then echo "${left%%.*}"; fi
}
""",
}

TIMER = """\
# @system@ sends no signal to a batch script before its limit: a timer does.
left=$(seconds_left)
if [[ -n $left ]] && ((left > @signal_s@)); then
    (
        for ((left -= @signal_s@; left > 0; left -= 10)); do
            sleep $((left < 10 ? left : 10))
            kill -0 $$ 2>/dev/null || exit 0
        done
        kill -USR1 $$
    ) </dev/null >/dev/null 2>&1 & # whoever reads the job's output need not wait for it
fi
"""

EACH = """\
extra=()
on_each() { # HOSTS... -- COMMAND: one task of it on each, without MPI
    local each=$RUN_DIR/each-$1 options=() hosts=()
    while [[ $1 != -- ]]; do hosts+=("$1"); shift; done
    shift
    printf '%s\\n' "${hosts[@]}" >"$each"
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
"""

LAUNCH = """\
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
            echo "PALS starts equally many ranks on each node, in order, and the strategy wants others (see above):" \\
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
"""

FINISH = """\
# The marker decides, not the exit code, which a launcher may blur. The same run goes on in another job, unless it has
# done so MAX_RESTARTS times, or has made no progress since the last time.
finish() { # exit code of the run
    if [[ -e $RUN_DIR/REQUEUE ]]; then
        requeue
    elif (($1 == 75)); then
        requeue --not-started
    fi
    exit @finished@
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
    exit @refused@
}
"""

AGAIN = {
    "pbs": """\
again() { # PBS lets only its managers rerun a job: a job like this one, which goes on in the same run directory
    local job name names=RUN_DIR
    job=$(qstat -f -w "$PBS_JOBID")
    for name in TRAIN MPITRAIN_SITE; do
        if [[ -v $name ]]; then names+=,$name; fi
    done
    resource() { sed -n "s/^ *Resource_List.$1 = //p" <<<"$job"; }
    export RUN_DIR
    qsub -W depend=afterany:"$PBS_JOBID" -l select="$(resource select)" -l place="$(resource place)" \\
        -l walltime="$(resource walltime)" -v "$names" "$SCRIPT"
    exit 75
}
""",
    "lsf": """\
again() { exit 75; } # which -Q has LSF requeue, under the same job id
""",
    "flux": """\
again() { # a job like this one, of the instance around this one, which goes on in the same run directory
    flux --parent batch --nodes="${#HOSTS[@]}" --dependency="afterany:$FLUX_ENCLOSING_ID" \\
        --env=RUN_DIR="$RUN_DIR" "$SCRIPT" "${ARGUMENTS[@]}"
    exit 75
}
""",
}

# The batch system removes its copy of the script when the job ends, which is before the next job begins.
KEEP_SCRIPT = """\
SCRIPT=$RUN_DIR/batch-script
if [[ $0 != "$SCRIPT" ]]; then cp "$0" "$SCRIPT"; fi
"""
