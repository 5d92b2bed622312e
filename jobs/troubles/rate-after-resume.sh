# After a resume with other ranks the rate is another one (open-mmlab/mmdetection#3800). Here it follows the samples.
. "$(dirname "$0")/common.sh"
train="train jobs/digits.py --epochs 4 --target accuracy=0 --schedule cosine()"
mpitrain launch -n 2 $train --run-dir "$RUNS/two-ranks" --steps 90
mpitrain launch -n 2 $train --run-dir "$RUNS/two-then-four" --steps 45
mpitrain launch -n 4 $train --run-dir "$RUNS/two-then-four" --resume auto --steps 68
for run in two-ranks two-then-four; do
    newest=$(ls "$RUNS/$run/checkpoints" | grep '^[0-9]' | tail -n 1)
    echo "$run after ${newest##*00} samples: $(grep -o '"lr": [0-9.e-]*[0-9]' "$RUNS/$run/checkpoints/$newest/shard-0.json" | head -n 1)"
done
