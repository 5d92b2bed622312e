"""The scripts for strangers, over gloo and over MPI. Arguments: name=port of gloo's store, for each."""

import os
import pathlib
import sys

import torch.distributed as dist

from benchmarks.measuring.gloo import never_destroyed
from mpitrain.system.launched.launch_variables import torchrun_names
from tests.ranks import ROOT

os.environ |= torchrun_names()
os.environ["MASTER_ADDR"] = "127.0.0.1"
for name, port in (text.split("=") for text in sys.argv[1:]):
    os.environ["MASTER_PORT"] = (
        port  # two gloo groups in turn at one port would meet in the first one's store
    )
    for backend in ("gloo", "mpi4py"):
        code = pathlib.Path(ROOT, "jobs", "scripts", name + ".py").read_text()
        if backend == "gloo":
            for ours, theirs in [
                ('"mpi4py"', '"gloo"'),
                ("dist.destroy_process_group()", ""),
            ]:
                assert ours in code
                code = code.replace(ours, theirs)
        print(name, backend, end=" ", flush=True)
        names: dict[str, object] = {}
        exec(compile(code, name, "exec"), names)
        if backend == "gloo":
            never_destroyed(dist.group.WORLD, names)
            dist.destroy_process_group()
        print(flush=True)
