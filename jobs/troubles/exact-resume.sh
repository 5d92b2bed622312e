# A resume repeats or skips samples (huggingface/accelerate#2016). Here an interrupted run ends with the same bits.
. "$(dirname "$0")/common.sh"
mpitrain launch -n 2 train jobs/digits.py --epochs 2 --target accuracy=0 --run-dir "$RUNS/whole"
mpitrain launch -n 2 train jobs/digits.py --epochs 2 --target accuracy=0 --run-dir "$RUNS/halves" --steps 37
mpitrain launch -n 2 train jobs/digits.py --epochs 2 --target accuracy=0 --run-dir "$RUNS/halves" --resume auto
cmp "$RUNS/whole/model.safetensors" "$RUNS/halves/model.safetensors"
echo "both models are the same to the bit"
