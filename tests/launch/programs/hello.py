"""Prints rank, size, threads, cores and arguments."""

import os
import sys

from mpi4py import MPI

rank, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
cores = len(os.sched_getaffinity(0))
sys.stdout.write(f"{rank}/{size} {os.environ['OMP_NUM_THREADS']} {cores} {sys.argv[1:]}\n")
