"""All ranks but the first die at once."""

import os
import signal

from mpitrain.mpi.bindings import MPI
from mpitrain.mpi.engine.engine import Engine
from mpitrain.mpi.faults.errors import is_dead_peer
from mpitrain.mpi.runtime import start

runtime = start()
runtime.barrier()
if runtime.rank:
    os.kill(os.getpid(), signal.SIGKILL)
engine = Engine(runtime.comm)
ops = [engine.irecv(bytearray(9), source, 1, passive=True) for source in (1, 2, 3)]
while len(runtime.dead()) < 3:
    MPI.COMM_SELF.Iprobe()  # MPI learns of all three before anybody asks for what is outstanding
engine.wait_any(lambda: all(op.done for op in ops), timeout_s=30)
print([is_dead_peer(op.error) for op in ops], len(engine.outstanding), flush=True)
os._exit(0)
