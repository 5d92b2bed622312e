"""A real Slurm on one machine: munged, slurmctld and several slurmd with fake GPUs, from Debian packages.

Invariants: the standard library only, everything below one directory, and `down` ends exactly the daemons that
`up` started, by their pid files. The tests and `make slurm` use the same class; a person calls

    python tests/slurm/cluster.py shell        a shell in which sbatch, srun and the templates work
    python tests/slurm/cluster.py up DIR       only start it;  ... down DIR  ends it

A GPU is a plain file, one folder of them a node, so that a test can take one away. Nodes have no cores of their own:
all share this machine's.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
CPUS_PER_NODE = 8
_PMIX = Path("/usr/lib/x86_64-linux-gnu/pmix2/lib")

_CONF = """\
ClusterName=mini
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={root}/state
SlurmctldPidFile={root}/pids/slurmctld
SlurmctldLogFile={root}/log/slurmctld
SlurmdPidFile={root}/pids/%n
SlurmdLogFile={root}/log/%n
SlurmdSpoolDir={root}/spool/%n
TmpFS={root}/nodes/%n/tmp
TaskProlog={root}/task_prolog
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
MpiDefault=pmix
JobCompType=jobcomp/filetxt
JobCompLoc={root}/log/jobs
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,bf_hetjob_immediate,batch_sched_delay=0,sched_min_interval=100000
KillWait=10
SlurmdTimeout=15
ReturnToService=2
MinJobAge=3600
FirstJobId={first_job}
PropagateResourceLimits=NONE
{nodes}
PartitionName=gpu Nodes={names} Default=YES MaxTime=INFINITE State=UP
PartitionName=cpu Nodes={first} MaxTime=INFINITE State=UP
"""

# What a person edits in slurm/site.sh: this python, and the paths that the Open MPI wheel needs without its mpirun.
_SITE = """\
# shellcheck shell=bash disable=SC2034,SC2016
source {repository}/slurm/site.sh
export PATH={bin}:$PATH PYTHONPATH={repository}/tests/at_start:{repository} PYTHONSAFEPATH=1
{mpi}
export OMP_NUM_THREADS=1 PYTHONFAULTHANDLER=1
DOCTOR=(--devices '{root}/nodes/$SLURMD_NODENAME/gpu*' --min-free-gib 0.01 --min-memory-gib 0.1 --speed-s 0)
"""
_OPENMPI = """\
LAUNCH=(srun --mpi=pmix)
export OPAL_PREFIX={prefix} PMIX_PREFIX={prefix} PMIX_MCA_psec=native PMIX_MCA_gds=hash OMPI_MCA_btl=^ofi
export OMPI_MCA_threads_pthreads_yield_strategy=nanosleep"""
_MPICH = "LAUNCH=(srun --mpi=pmi2)"

# What a site's prolog does: each node has a temporary directory of its own.
_PROLOG = """\
#!/bin/bash
echo "export TMPDIR={root}/nodes/$SLURMD_NODENAME/tmp"
"""


def mpi_of(python: Path) -> str:
    """`"mpich"`, or its kin, or `"openmpi"`, as far as a wheel shows it."""
    return "mpich" if (python.parent.parent / "lib" / "libmpi.so.12").exists() else "openmpi"


def why_not() -> str | None:
    """Why no mini-cluster can run here, or `None`."""
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"no Slurm ({', '.join(missing)} missing): apt-get install slurm-wlm munge libpmix2"
    if os.geteuid() != 0:
        return "the mini-cluster's daemons need root"
    if not (_PMIX / "libpmix.so.2").exists():
        return "no PMIx for srun: apt-get install libpmix2"
    return None


@dataclass(frozen=True)
class Cluster:
    """A mini-cluster below `root` with nodes n1, n2, ...; n1 alone is the partition `cpu`, all are `gpu`."""

    root: Path
    num_nodes: int = 3
    gpus_per_node: int = 2
    conf: str = ""  # further lines; of two with one name the later one holds

    @property
    def names(self) -> list[str]:
        """The nodes' names."""
        return [f"n{index + 1}" for index in range(self.num_nodes)]

    @property
    def env(self) -> dict[str, str]:
        """What a shell needs to talk to it."""
        return {"SLURM_CONF": str(self.root / "slurm.conf")}

    def up(self) -> Cluster:
        """Start the daemons and wait until every node is idle.

        Raises:
            RuntimeError: some daemon did not come up; the message ends with its log.
        """
        self._lay_out()
        try:
            self._start_all()
        except BaseException:
            self.down()
            raise
        return self

    def site(self, python: Path = Path(sys.executable)) -> Path:
        """Write and return this cluster's site file for the environment of `python`, whichever MPI it has."""
        mpi = mpi_of(python)
        path = self.root / f"site-{mpi}.sh"
        launch = _MPICH if mpi == "mpich" else _OPENMPI.format(prefix=python.parent.parent)
        bin = self.bin(python)
        bin.mkdir(exist_ok=True)
        program = bin / "mpitrain"  # an environment that borrows mpitrain has no such script
        program.write_text(f'#!/bin/sh\nexec {python} -m mpitrain "$@"\n')
        program.chmod(0o755)
        path.write_text(_SITE.format(repository=ROOT, bin=bin, mpi=launch, root=self.root))
        return path

    def bin(self, python: Path = Path(sys.executable)) -> Path:
        """Where `site` puts the `mpitrain` of this python."""
        return self.root / f"bin-{mpi_of(python)}"

    def _lay_out(self) -> None:
        self.root.chmod(0o755)
        for folder in ("munge", "state", "pids", "log", "spool"):
            (self.root / folder).mkdir()
        for name in self.names:
            (self.root / "spool" / name).mkdir()
            (self.root / "nodes" / name / "tmp").mkdir(parents=True)
            for gpu in range(self.gpus_per_node):
                self.gpu(name, gpu).touch()
        key = self.root / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        ports = _free_ports(self.num_nodes + 1)
        host = socket.gethostname().partition(".")[0]
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={name} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS_PER_NODE} "
            f"RealMemory=4000 Gres=gpu:{self.gpus_per_node} State=UNKNOWN"
            for name, port in zip(self.names, ports[1:])
        )
        conf = _CONF.format(
            host=host,
            ports=ports,
            root=self.root,
            nodes=nodes,
            names=",".join(self.names),
            first=self.names[0],
            # Open MPI names the memory that ranks of a node share by host and job, so jobs of two clusters must differ.
            first_job=1000 * random.SystemRandom().randrange(1, 60_000),
        )
        (self.root / "slurm.conf").write_text(conf + self.conf)
        (self.root / "gres.conf").write_text(
            "".join(
                f"NodeName={name} Name=gpu File={self.root}/nodes/{name}/gpu[0-{self.gpus_per_node - 1}]\n"
                for name in self.names
            )
        )
        prolog = self.root / "task_prolog"
        prolog.write_text(_PROLOG.format(root=self.root))
        prolog.chmod(0o755)

    def _start_all(self) -> None:
        unversioned = _PMIX / "libpmix.so"  # Slurm's plugin opens it by this name, which Debian leaves out
        if not unversioned.exists():
            unversioned.symlink_to("libpmix.so.2")
        munge = self.root / "munge"
        munged = ["munged", "--force", f"--key-file={munge}/key", f"--socket={munge}/socket"]
        munged += [f"--pid-file={self.root}/pids/munged", f"--seed-file={munge}/seed"]
        self._start([*munged, f"--log-file={self.root}/log/munged"])
        self._start(["slurmctld"])
        for name in self.names:
            self.start_node(name)
        self.wait_for(self.all_idle, "all nodes to be idle", timeout_s=30)

    def all_idle(self) -> bool:
        """Whether every node answers and has nothing to do."""
        states = self.ask("sinfo", "--noheader", "--Node", "--partition=gpu", "--format=%t").split()
        return states == ["idle"] * self.num_nodes

    def gpu(self, node: str, index: int) -> Path:
        """The file that is a node's GPU."""
        return self.root / "nodes" / node / f"gpu{index}"

    def start_node(self, name: str) -> None:
        """Start the slurmd of one node."""
        # A host name of its own (UTS namespace): PMIx looks up its node by it, and MPI takes nodes for different hosts.
        self._start(["unshare", "--uts", "sh", "-c", f"hostname {name} && exec slurmd -N {name}"])

    def kill_node(self, name: str) -> None:
        """Take a node away: its daemon, its job steps and everything that runs in them die at once."""
        namespace = os.readlink(f"/proc/{(self.root / 'pids' / name).read_text().strip()}/ns/uts")
        # Stopped first, or Slurm's daemons would see the ranks die before they do, and say so.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for entry in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):
                    if os.readlink(entry / "ns" / "uts") == namespace:
                        _kill(int(entry.name), number)

    def down(self) -> None:
        """End all jobs and daemons of this cluster; whatever still runs after 3 s is killed."""
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            self._run(["scancel", "--user=root", "--signal=KILL", "--full"], timeout=10)
        pids = self._processes()
        for pid in pids:
            _kill(pid, signal.SIGTERM)
        deadline_s = time.monotonic() + 3
        while (left := [pid for pid in self._processes() if _alive(pid)]) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        for pid in left:
            _kill(pid, signal.SIGKILL)
        self.wait_for(lambda: not any(map(_alive, left)), "daemons to end", timeout_s=10)

    def _processes(self) -> list[int]:
        """Daemons, by their pid files, and all that was started with this cluster's configuration."""
        pids = []
        for path in (self.root / "pids").iterdir():
            with contextlib.suppress(OSError, ValueError):
                pids.append(int(path.read_text()))
        mark = f"SLURM_CONF={self.root}/slurm.conf".encode()
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if entry.name != str(os.getpid()) and mark in (entry / "environ").read_bytes().split(b"\0"):
                    pids.append(int(entry.name))
        return pids

    def ask(self, *command: str, timeout_s: float = 30) -> str:
        """The stdout of a Slurm command; its stderr with the exit code if it fails, as RuntimeError."""
        run = self._run(list(command), timeout=timeout_s)
        if run.returncode:
            raise RuntimeError(f"{' '.join(command)}: exit code {run.returncode}: {run.stderr or run.stdout}")
        return run.stdout

    def wait_for(self, condition: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Poll until `condition()`; RuntimeError with the end of all logs when `timeout_s` has passed."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(RuntimeError):
                if condition():
                    return
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"waited {timeout_s} s for {what}\n{_processes()}\n{self.logs()}")
            time.sleep(0.1)

    def logs(self) -> str:
        """The end of every daemon's log."""
        texts = [
            f"== {path.name}\n{path.read_text(errors='replace')[-600:]}"
            for path in sorted((self.root / "log").iterdir())
        ]
        return "\n".join(texts)

    def _run(self, command: list[str], timeout: float) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, **self.env}
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env)

    def _start(self, command: list[str]) -> None:
        run = self._run(command, timeout=30)
        if run.returncode:
            raise RuntimeError(f"{' '.join(command)}: {run.stderr or run.stdout}\n{self.logs()}")


def _processes() -> str:
    """Those that are Slurm's or a job's, and what in the kernel each waits in: what the daemons' logs do not say."""
    command = ["ps", "-eo", "pid,ppid,stat,wchan:20,etimes,args", "--cols", "160"]
    lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    theirs = [line for line in lines if any(name in line for name in ("slurm", "srun", "mpitrain"))]
    return "\n".join(["== processes", *lines[:1], *theirs])


def _free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, below those that the system gives to whoever asks for any: one of those may be
    taken again before a daemon binds it."""
    first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    with contextlib.ExitStack() as stack:
        found: list[int] = []
        for port in random.SystemRandom().sample(range(10_000, first_ephemeral), 1000):
            each = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                each.bind(("127.0.0.1", port))
                found.append(port)
            if len(found) == count:
                return found
    raise RuntimeError(f"no {count} free ports between 10000 and {first_ephemeral}")


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _shell(cluster: Cluster) -> int:
    """A shell inside the cluster; the cluster ends with it."""
    site = cluster.site()
    print(f"nodes {', '.join(cluster.names)} are idle; leave this shell and they are gone. Try:")
    print("  sbatch slurm/multi-node.sbatch jobs/digits.py --strategy 'async(servers=2)'; squeue")
    path = f"{cluster.bin()}:{os.environ['PATH']}"
    env = {**os.environ, **cluster.env, "MPITRAIN_SITE": str(site), "SBATCH_GPUS_PER_NODE": "2", "PATH": path}
    return subprocess.run([os.environ.get("SHELL", "/bin/bash")], env=env).returncode


def main() -> int:
    """The command line of the head of this file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("up", "down", "shell"))
    parser.add_argument("directory", nargs="?", help="below which everything lies (default: a temporary one)")
    parser.add_argument("--nodes", type=int, default=3, help="how many (default: 3)")
    arguments = parser.parse_args()
    if arguments.action == "down":
        if not arguments.directory:
            parser.error("down which? Give the directory that `up` was given")
        Cluster(Path(arguments.directory).resolve()).down()
        return 0
    if reason := why_not():
        print(f"no mini-cluster here: {reason}", file=sys.stderr)
        return 1
    root = Path(arguments.directory or tempfile.mkdtemp(prefix="mini-slurm-")).resolve()
    root.mkdir(parents=True, exist_ok=True)
    cluster = Cluster(root, arguments.nodes).up()
    if arguments.action == "up":
        print(f"export SLURM_CONF={root}/slurm.conf MPITRAIN_SITE={cluster.site()}")
        return 0
    try:
        return _shell(cluster)
    finally:
        cluster.down()
        if not arguments.directory:
            shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
