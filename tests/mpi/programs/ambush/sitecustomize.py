"""On PYTHONPATH: sends rank 1 the signal AMBUSH just before it would start MPI."""

import os
import signal
import sys
from importlib.abc import MetaPathFinder


class Ambush(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "mpi4py":
            os.kill(os.getpid(), signal.Signals[os.environ["AMBUSH"]])
        return None


if "1" in (os.environ.get("OMPI_COMM_WORLD_RANK"), os.environ.get("PMI_RANK")):
    sys.meta_path.insert(0, Ambush())
