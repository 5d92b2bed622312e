# A checkpoint written inside a signal handler crashes (Lightning-AI/pytorch-lightning#21406). Here a step ends first.
. "$(dirname "$0")/common.sh"
mpitrain launch -n 2 train jobs/digits.py --epochs 200 --run-dir "$RUNS/a" &
until grep -q progress "$RUNS/a/metrics.jsonl" 2>/dev/null; do sleep 0.2; done
kill -USR1 $!
code=0
wait $! || code=$?
echo "exit code $code, and $(ls "$RUNS/a" | grep REQUEUE) is there: the same command with --resume auto goes on"
test "$code" = 75
