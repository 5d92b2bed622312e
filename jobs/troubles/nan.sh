# The newest checkpoint holds NaN (Rikorose/DeepFilterNet#30). Here a gradient that is not finite reaches no model.
. "$(dirname "$0")/common.sh"
train="train jobs/digits.py --epochs 2 --target accuracy=0 --run-dir $RUNS/a --checkpoint-every 320"
mpitrain launch --max-restarts 0 -n 3 $train --strategy "async(servers=1)" --inject "nan(worker=1, at_step=30)" || echo "exit code $?"
mpitrain launch -n 3 $train --strategy "async(servers=1)" --resume auto
told a status resumed_from metrics
