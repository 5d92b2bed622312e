"""Where ReFrame starts ranks: on this host by `mpitrain launch`, or under Slurm by `srun`.

`MPITRAIN_SITE` names the site file of the batch scripts (`mpitrain slurm site` writes one), which is sourced before
each run; `MPITRAIN_PARTITION` a Slurm partition, and `MPITRAIN_SRUN` options of srun (default: --mpi=pmix).
"""

import os
import shlex
from pathlib import Path

_site = os.environ.get("MPITRAIN_SITE")
_partition = os.environ.get("MPITRAIN_PARTITION")
_common = {
    "environs": ["builtin"],
    "max_jobs": 1,
    "prepare_cmds": [f"source {shlex.quote(str(Path(_site).resolve()))}"] if _site else [],
}

site_configuration = {
    "systems": [
        {
            "name": "here",
            "descr": "the machine on which ReFrame runs",
            "hostnames": [".*"],
            "partitions": [
                {"name": "local", "scheduler": "local", "launcher": "local", **_common},
                {
                    # `squeue` asks no accounting data base, which many clusters, and the tests' one, do not have
                    "name": "slurm",
                    "scheduler": "squeue",
                    "launcher": "srun",
                    "access": [f"--partition={_partition}"] if _partition else [],
                    "extras": {"srun": shlex.split(os.environ.get("MPITRAIN_SRUN", "--mpi=pmix"))},
                    **_common,
                },
            ],
        }
    ],
}
