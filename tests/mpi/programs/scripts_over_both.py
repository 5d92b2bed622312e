"""The scripts for strangers, over gloo and over MPI. Arguments: name=port of gloo's store, for each."""

import os
import pathlib
import sys

from tests.ranks import ROOT

os.environ |= {"RANK": os.environ["OMPI_COMM_WORLD_RANK"], "WORLD_SIZE": os.environ["OMPI_COMM_WORLD_SIZE"]}
os.environ["MASTER_ADDR"] = "127.0.0.1"
for name, port in (text.split("=") for text in sys.argv[1:]):
    os.environ["MASTER_PORT"] = (
        port  # two gloo groups in turn at one port would meet in the first one's store
    )
    for backend in ("gloo", "mpi4py"):
        code = pathlib.Path(ROOT, "jobs", "scripts", name + ".py").read_text()
        if backend == "gloo":
            code = code.replace('"mpi4py"', '"gloo"').replace("import mpitrain  # noqa: F401", "")
        print(name, backend, end=" ", flush=True)
        exec(compile(code, name, "exec"), {})
        print(flush=True)
