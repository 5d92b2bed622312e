# shellcheck shell=bash disable=SC2016,SC2034
# What is your centre's, and nothing else: every template sources this file on the first node of the job.
# Lines with a # are alternatives; leave exactly one LAUNCH. `mpitrain slurm site --launcher NAME` writes it for yours.

# 1. Software: modules, then the environment in which mpitrain is installed.
# module purge; module load openmpi/5 cuda
# source "$HOME/venv/bin/activate"
# On hundreds of nodes: the packages sent to each node's own disk once, where every rank reads a shared one otherwise.
# Made by: tar -C "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" -cf packages.tar .
# PACKAGES=/tmp/packages-$SLURM_JOB_ID; sbcast --force packages.tar "$PACKAGES.tar"
# srun --mpi=none --ntasks-per-node=1 --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --overlap \
#     bash -c 'mkdir -p "$0" && tar -C "$0" -xf "$0.tar"' "$PACKAGES"
# export PYTHONPATH=$PACKAGES${PYTHONPATH:+:$PYTHONPATH}

# 2. How ranks start.
LAUNCH=(srun --mpi=pmix) # Open MPI 4 or 5
# LAUNCH=(srun --mpi=pmi2) # MPICH, MVAPICH2, ParaStation
# LAUNCH=(srun --mpi=cray_shasta); export MPICH_GPU_SUPPORT_ENABLED=1 # Cray MPICH
# LAUNCH=(srun --mpi=pmi2); export I_MPI_PMI_LIBRARY=/usr/lib64/libpmi2.so I_MPI_CBWR=1 # Intel MPI
# LAUNCH=(mpirun) # Open MPI's own launcher
# LAUNCH=(mpiexec); export SLURM_MPI_TYPE=none # MPICH's and Intel's Hydra
# LAUNCH=(mpiexec --line-buffer) # HPE Cray's PALS, under PBS
# LAUNCH=(flux run) # Flux
# LAUNCH=(ibrun) # sites that wrap it: see whether it takes -n and -f
# export MPITRAIN_FT=ulfm # srun with Open MPI 5, in tolerant.sbatch: workers and all-reduce ranks may die, and nodes
# export MPITRAIN_FT=heartbeat # srun with MPICH or its kin: strategies with servers go on without a worker that dies

# 3. Where ranks run on their node: cores and memory of the same NUMA domain; every rank sees all GPUs of its node.
BIND=(--cpu-bind=cores --mem-bind=local --gpu-bind=none) # srun
# BIND=(--bind-to numa) # mpirun
# BIND=(-bind-to numa) # mpiexec
# BIND=(--cpu-bind numa) # pals
# BIND=(-o cpu-affinity=per-task) # flux
# AMD, Intel: a device is a die (GCD) or a stack (tile). Where Slurm counts cards, say how many devices a node has.
# export WORKERS_PER_NODE=8
# export I_MPI_OFFLOAD=1 # Intel MPI reads and writes device memory

# 4. A container instead of an environment (its MPI must be ABI-compatible with the site's). For AMD's devices --rocm
# stands in place of --nv, for Intel's --bind /dev/dri.
CONTAINER=()
# CONTAINER=(apptainer exec --nv --bind "$PWD" mpitrain.sif)

# 5. Disks. STAGE: packs (folders of `mpitrain data pack`) to copy to each node's own disk before training, where ranks
# then read them; STAGE_TO: where, expanded on the node, which refuses a $VARIABLE that is not set there.
STAGE=()
# STAGE=(data/digits)
STAGE_TO='$TMPDIR/mpitrain'
# KEEP_STAGED=1 # the job's end leaves the copies where they are
export HDF5_USE_FILE_LOCKING=FALSE # parallel file systems often have no locks

# 6. What a fit node has: see mpitrain doctor --help.
DOCTOR=(--min-free-gib 1 --min-memory-gib 1)

# 7. Defaults of sbatch, for a shell that has sourced this file: . slurm/site.sh; sbatch slurm/single-node.sbatch ...
# export SBATCH_ACCOUNT=... SBATCH_PARTITION=... SBATCH_GPUS_PER_NODE=4
