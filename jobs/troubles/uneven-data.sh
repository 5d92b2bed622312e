# Ranks with fewer batches leave the others hanging (Lightning-AI/pytorch-lightning#20404). Here 1,438 samples go to 3 workers.
. "$(dirname "$0")/common.sh"
mpitrain launch -n 3 train jobs/digits.py --epochs 1 --target accuracy=0 --run-dir "$RUNS/a"
told a status samples epochs samples_left_out
