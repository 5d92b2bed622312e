# A rank that dies leaves the others waiting for ever (pytorch/pytorch#101463). Here they do the step again without it.
. "$(dirname "$0")/common.sh"
mpitrain launch -n 4 --ft ulfm train jobs/digits.py --epochs 2 --target accuracy=0 --run-dir "$RUNS/a" \
    --inject "kill(worker=1, at_step=9)"
told a status lost samples
