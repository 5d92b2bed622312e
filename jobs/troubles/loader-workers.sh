# Loader workers that are forked from an MPI rank crash (pytorch/pytorch#13787). Here they hold no MPI.
. "$(dirname "$0")/common.sh"
sed 's/batch_size=32,/batch_size=32, num_workers=2,/' jobs/scripts/ddp.py >"$RUNS/ddp.py"
grep -n num_workers "$RUNS/ddp.py"
mpitrain launch -n 2 "$RUNS/ddp.py"
