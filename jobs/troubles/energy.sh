# What energy has a job taken? (pytorch/pytorch#65985) Here every result says it, or that the machine does not tell.
. "$(dirname "$0")/common.sh"
mpitrain launch -n 2 train jobs/digits.py --epochs 2 --target accuracy=0 --run-dir "$RUNS/a"
told a energy_joules energy_source node_hours wall_s
