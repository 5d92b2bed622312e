# A collective times out, and nobody says whose fault it is (pytorch/pytorch#118369). Here the rank and its line are told.
. "$(dirname "$0")/common.sh"
mpitrain launch -n 3 --max-restarts 0 train jobs/digits.py --epochs 2 --run-dir "$RUNS/a" --watchdog-s 20 \
    --inject "pause(worker=1, at_step=9, seconds=600)" || echo "exit code $?"
ls "$RUNS/a/stacks"
