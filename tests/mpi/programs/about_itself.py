"""Prints what a rank has from its launcher."""

import json
import os
import resource
import signal
import sys

LAUNCHERS = ("PMIX", "OMPI", "PRTE", "I_MPI_HYDRA_UUID")

print(
    json.dumps(
        {
            "argv": sys.argv[1:],
            "name": __name__,
            "file": __file__,
            "main": sys.modules["__main__"].__file__,
            "cwd": os.getcwd(),
            "path": sys.path,
            "mask": os.umask(0o27),
            "limits": [resource.getrlimit(kind) for kind in (resource.RLIMIT_CORE, resource.RLIMIT_NOFILE)],
            "interrupt": str(signal.getsignal(signal.SIGINT)),
            "host": os.uname().nodename,
            "cores": sorted(os.sched_getaffinity(0)),
            "files": sorted(os.listdir("/proc/self/fd")),
            "environ": {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS) and k != "_"},
        }
    )
)
