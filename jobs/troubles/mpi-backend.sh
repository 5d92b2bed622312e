# torch's wheels have no MPI (epfml/federated-learning-public-code#8). Here DDP takes the backend "mpi4py".
. "$(dirname "$0")/common.sh"
grep -n init_process_group jobs/scripts/ddp.py
mpitrain launch -n 2 jobs/scripts/ddp.py
