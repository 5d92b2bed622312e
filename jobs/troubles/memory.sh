# Each rank holds the whole data set (libffcv/ffcv#120). Here ranks read chunks of the same files, as they need them.
. "$(dirname "$0")/common.sh"
"$python" jobs/troubles/large.py "$RUNS"
mpitrain data pack "$RUNS/large.npz" "$RUNS/large" >/dev/null
LARGE=$RUNS/large mpitrain launch -n 4 train jobs/troubles/large.py --run-dir "$RUNS/a"
du -sh "$RUNS/large"
told a metrics
