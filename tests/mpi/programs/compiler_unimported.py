"""Which ranks have imported torch's compiler by the end of an asynchronous run: `compiler_unimported.py DIRECTORY`."""

import sys

import mpitrain as mt
from mpitrain.mpi.runtime import start
from tests import toy

runtime = start()
mt.train(toy.make_job(validate=toy.Memory()), mt.Async(servers=1), run_dir=sys.argv[1], quiet=True)
print(runtime.role, "torch._dynamo" in sys.modules)
