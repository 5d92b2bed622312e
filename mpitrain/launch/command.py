"""`mpitrain launch`: build the launcher's command line, judge how it ended, start it again.

Invariants: building the command is a pure function of what was found and asked (`launch_command`), so
that every decision has a test; `supervision.py` starts the process and watches over it. The launcher adds nothing to
the command line that a person could not type: `mpirun` and `srun` by hand stay equal. Nothing here imports MPI or
torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpitrain.errors import (
    EXIT_ENDED_AT_ONCE,
    EXIT_ERROR,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_PREFLIGHT_FAILED,
    EXIT_REQUEUE,
    EXIT_TARGET_MISSED,
    EXIT_USAGE,
    UsageError,
)  # fmt: skip
from mpitrain.launch import srun_plugins
from mpitrain.launch.discover import Launcher, own_python
from mpitrain.launch.supervision import Outcome, Requests
from mpitrain.system.files.run_directory import is_same_start, progress, read_json, why_no_room
from mpitrain.system.launched.fault_levels import WITHOUT_ULFM
from mpitrain.system.launched.launch_variables import allocated_hosts, launched_nodes
from mpitrain.system.launched.transports import closed, over
from mpitrain.system.memory import in_huge_pages
from mpitrain.system.saying import tell

# Any of these among the launcher's own arguments means that ranks may run on other hosts.
_HOST_OPTIONS = (
    "-H",
    "-host",
    "--host",
    "-hosts",
    "--hosts",
    "-f",
    "-hostfile",
    "--hostfile",
    "-machinefile",
    "--machinefile",
)
# Batch systems whose allocation mpirun reads by itself, by the file with its hosts.
_ALLOCATIONS = {"PBS_NODEFILE": "PBS", "LSB_DJOB_HOSTFILE": "LSF", "PE_HOSTFILE": "Grid Engine"}
_OF_A_SYSTEM = ("srun", "flux", "pals")  # launchers that start ranks on the nodes of their system's job

# Which transports Open MPI takes. That of libfabric looks for a fabric, and sleeps for a second where it finds none;
# ranks on one host use shared memory, and TCP would open a port on every network for nothing.
_BTL = "OMPI_MCA_btl"
_BINDING = "OMPI_MCA_hwloc_base_binding_policy"
# MPICH's Hydra binds nobody. Intel's gives each rank a part of the cores, and with as many ranks as cores one: torch's
# threads and the communication thread would share it, and so would the ranks of two launches, beside idle cores.
_PINNING = "I_MPI_PIN"
# Open MPI's launcher looks after 300 s, and then for 180 s more, whether a silent host is still there.
_KEEPALIVE = {
    "oob_tcp_keepalive_time": "20",
    "oob_tcp_keepalive_intvl": "5",
    "oob_tcp_keepalive_probes": "6",
}


@dataclass(frozen=True)
class Asked:
    """Everything a command line depends on.

    Args:
        program: what each rank runs.
        num_cores: cores this process may use; speaks for the ranks only where they run on this host.
        environ: the present environment; what it already sets is left alone.
        fault_tolerance: `"none"`, `"ulfm"` or `"heartbeat"`.
        host_args: the user's own arguments to the launcher; they come after ours.
        interface: the network that ranks listen and talk on; empty: shared memory on one node, else MPI's choice.
    """

    launcher: Launcher
    num_ranks: int
    program: Sequence[str]
    num_cores: int
    environ: Mapping[str, str]
    is_root: bool = False
    fault_tolerance: str = "none"
    host_args: Sequence[str] = ()
    interface: str = ""

    @property
    def local(self) -> bool:
        """Whether all ranks run on this host, so that its cores say something."""
        return is_local(self.launcher, self.host_args, self.environ)


def is_local(launcher: Launcher, host_args: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether all ranks run on this host."""
    if launcher.flavour in _OF_A_SYSTEM or any(name in environ for name in _ALLOCATIONS):
        return False
    if "SLURM_JOB_ID" in environ and launched_nodes(environ) != 1:
        return False
    return not any(word.partition("=")[0] in _HOST_OPTIONS for word in host_args)


def left_to_launcher(launcher: Launcher, host_args: Sequence[str], environ: Mapping[str, str]) -> str:
    """Who chooses the hosts inside a batch system whose allocation this command does not read; empty elsewhere."""
    system = next((_ALLOCATIONS[name] for name in _ALLOCATIONS if name in environ), None)
    if system is None or launcher.flavour in ("srun", "flux"):
        return ""
    if any(word.partition("=")[0] in _HOST_OPTIONS for word in host_args):
        return f"inside a job of {system}: on the hosts of --host-args"
    hosts = allocated_hosts(environ)
    named = ", ".join(hosts[:4]) + (", ..." if len(hosts) > 4 else "")
    where = f" ({len(hosts)}: {named})" if hosts else ""
    return f"inside a job of {system}: {launcher.path} takes the job's hosts{where}"


def launch_command(ask: Asked) -> tuple[list[str], dict[str, str]]:
    """The command line and what to add to the environment.

    Raises:
        UsageError: `ulfm` asked of another MPI than Open MPI 5, under its mpirun or srun, `heartbeat` of other than
            srun and MPICH; this Slurm has no plugin that the MPI speaks.
    """
    launcher, interface, host_args, environ = ask.launcher, ask.interface, ask.host_args, ask.environ
    num_ranks, fault_tolerance, program = str(ask.num_ranks), ask.fault_tolerance, ask.program
    _check_level(launcher, fault_tolerance)
    env = (over(interface) if interface else {}) | in_huge_pages(environ)
    env |= _threads(ask) | ({"MPITRAIN_FT": fault_tolerance} if fault_tolerance != "none" else {})
    if launcher.flavour == "openmpi":
        options = _openmpi_options(ask, env)
        if interface and not ask.local:
            options += (
                ["--mca", "oob_tcp_if_include", interface]
                if launcher.before_5
                else ["--prtemca", "prte_if_include", interface]
            )
        if ask.local and launcher.before_5 and _BINDING not in environ:
            env[_BINDING] = "none"  # what --oversubscribe does in 5
        if ask.local and _BTL not in environ:
            named = interface or any(word.startswith(("btl", "pml", "mtl")) for word in host_args)
            env[_BTL] = "^ofi,tcp" if _BTL in closed(environ) and not named else "^ofi"
        if ask.is_root:
            env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    elif launcher.flavour == "srun":
        plugin = _srun_plugin(ask)
        options = _srun_options(ask, plugin)
        env |= _srun_variables(ask, plugin)
    elif launcher.flavour == "flux":
        # By itself Flux gives each rank its own GPUs, which hides the neighbours' and breaks copies between devices.
        options = ["-o", "gpu-affinity=off"]
        return [launcher.path, "run", "-n", num_ranks, *options, *host_args, *program], env
    elif launcher.flavour == "pals":
        options = ["--ppn", str(-(-ask.num_ranks // max(1, launched_nodes(environ) or 1)))]
    else:
        # Hydra oversubscribes by itself and hands on the whole environment
        options = ["-iface", interface] if interface else []
        if "SLURM_JOB_ID" in environ and "SLURM_MPI_TYPE" not in environ:
            # It starts its proxies by srun, whose default plugin would show ranks a second way to find each other.
            env["SLURM_MPI_TYPE"] = "none"
        if ask.local and not any(name.startswith(_PINNING) for name in environ):
            env[_PINNING] = "off"
        if ask.local and not interface:
            env |= {name: value for name, value in closed(environ).items() if name != _BTL}
    return [launcher.path, "-n", num_ranks, *options, *host_args, *program], env


def own_program(words: Sequence[str]) -> list[str]:
    """The words that run a command of this package in this python."""
    return [*own_python(), "-m", "mpitrain", *words]


def own_script(words: Sequence[str]) -> list[str]:
    """The words that run a script in this python, which finds the variables that torchrun sets."""
    return [*own_python(), "-m", "mpitrain.launch.torchrun_names", *words]


def _check_level(launcher: Launcher, fault_tolerance: str) -> None:
    srun, mpich = launcher.flavour == "srun", launcher.library == "mpich"
    if fault_tolerance == "ulfm" and launcher.before_5:
        raise UsageError(
            f"--ft ulfm needs Open MPI 5, and {launcher.path} is of an older one, where MPI informs no rank of a "
            "rank's death: leave --ft out, which is `restart`, or load a module of Open MPI 5"
        )
    if fault_tolerance == "ulfm" and launcher.flavour != "openmpi" and (mpich or not srun):
        way_out = (
            "that is --ft heartbeat here, or leave it out, which is `restart`"
            if srun and mpich
            else WITHOUT_ULFM
        )
        raise UsageError(
            f"--ft ulfm needs Open MPI under its mpirun or srun; {launcher.path} is {launcher.flavour}, where MPI "
            f"informs no rank of a rank's death: {way_out}"
        )
    if fault_tolerance == "heartbeat" and not srun:
        way_out = (
            "--ft ulfm"
            if launcher.flavour == "openmpi" and not launcher.before_5
            else "leave --ft out, or run inside a Slurm allocation"
        )
        raise UsageError(
            f"--ft heartbeat needs srun and MPICH; {launcher.path} is {launcher.flavour}, which ends the job when a "
            f"rank dies: {way_out}"
        )
    if fault_tolerance == "heartbeat" and launcher.library == "openmpi":
        raise UsageError(
            "--ft heartbeat needs MPICH, and mpi4py here loads Open MPI, which has a better level: --ft ulfm"
        )


def _openmpi_options(ask: Asked, env: Mapping[str, str]) -> list[str]:
    options = []
    if ask.local:
        # Leave to start more ranks than Open MPI counts slots (it counts cores, not hardware threads). From 5 on it
        # also leaves ranks unbound: by default one or two ranks are bound to a single core each, which
        # torch's threads and the communication thread would have to share.
        options += ["--oversubscribe"]
        if ask.num_ranks > ask.num_cores:
            options += ["--mca", "mpi_yield_when_idle", "1"]
    if ask.fault_tolerance == "ulfm":
        options += ["--with-ft", "ulfm"]
    if not ask.local:
        # Open MPI hands its own variables to other hosts and no others.
        known = ("GLIBC_TUNABLES", "OMP_NUM_THREADS", "HDF5_USE_FILE_LOCKING")
        mca = "--mca" if ask.launcher.before_5 else "--prtemca"
        options += [word for name, value in _KEEPALIVE.items() for word in (mca, name, value)]
        names = {*env, *(name for name in ask.environ if name in known or name.startswith("MPITRAIN_"))}
        options += [word for name in sorted(names) for word in ("-x", name)]
    return options


def _srun_plugin(ask: Asked) -> str:
    """By what the ranks find each other; empty: as the site or the user have it."""
    launcher = ask.launcher
    kind = launcher.kind or launcher.library
    chosen = any(word.partition("=")[0] == "--mpi" for word in ask.host_args)
    if kind is None or chosen or "SLURM_MPI_TYPE" in ask.environ:
        return ""
    return srun_plugins.choose(kind, launcher.plugins, ask.environ)


def _srun_options(ask: Asked, plugin: str) -> list[str]:
    # One rank's failure ends the step; the site's default may leave the others waiting. Where they are to go on,
    # neither that default nor the site's WaitTime may end them.
    goes_on = ask.fault_tolerance != "none"
    options = ["--kill-on-bad-exit=0", "--no-kill", "--wait=0"] if goes_on else ["--kill-on-bad-exit=1"]
    return [*options, f"--mpi={plugin}"] if plugin else options


def _srun_variables(ask: Asked, plugin: str) -> dict[str, str]:
    wanted = srun_plugins.intel_variable(plugin, ask.launcher.pmi_libraries, ask.environ)
    if "SLURM_CPUS_PER_TASK" in ask.environ:
        wanted["SRUN_CPUS_PER_TASK"] = ask.environ[
            "SLURM_CPUS_PER_TASK"
        ]  # srun stopped inheriting it in Slurm 22.05
    if ask.launcher.wheel_prefix:
        prefix = ask.launcher.wheel_prefix
        wanted |= {
            "OPAL_PREFIX": prefix,
            "PMIX_PREFIX": prefix,
            "PMIX_MCA_psec": "native",
            "PMIX_MCA_gds": "hash",
        }
    return {name: value for name, value in wanted.items() if name not in ask.environ}


def _threads(ask: Asked) -> dict[str, str]:
    """`OMP_NUM_THREADS`: the batch system's share, or this host's cores dealt out; elsewhere unknown."""
    if "OMP_NUM_THREADS" in ask.environ:
        return {}
    if ask.environ.get("SLURM_CPUS_PER_TASK", "").isdigit():
        return {"OMP_NUM_THREADS": ask.environ["SLURM_CPUS_PER_TASK"]}
    return {"OMP_NUM_THREADS": str(max(1, ask.num_cores // ask.num_ranks))} if ask.local else {}


def result_mark(run_dir: Path) -> tuple[int, int] | None:
    """What distinguishes one `result.json` from the next, taken before a launch; `None` if there is none.

    It is the file's identity, so no clocks are compared.
    """
    try:
        found = (run_dir / "result.json").stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def has_result(run_dir: Path, before: tuple[int, int] | None, attempt: str = "") -> bool:
    """Whether a result is there that is newer than `before` (`result_mark`), and, where `attempt` is given, of that
    start and no other job's."""
    if result_mark(run_dir) in (None, before):
        return False
    return not attempt or is_same_start((read_json(run_dir / "result.json") or {}).get("attempt"), attempt)


def completed(
    run_dir: Path, before: tuple[int, int] | None, code: int, promised: bool = True, attempt: str = ""
) -> int:
    """The exit code of a run by its result; 0 only with a new `result.json` that says ok (mpirun's own says nothing
    under ULFM, srun's is that of a dead rank, and a rank may die when all is done).

    Args:
        before, attempt: see `has_result`.
        code: what the launcher returned; kept for a failed run if it is not 0.
        promised: whether the program always leaves a result; a script with a loop of its own need not.
    """
    path = run_dir / "result.json"
    if not has_result(run_dir, before, attempt):
        if promised:
            tell(f"mpitrain: error: the run left no new {path}: it did not come to its end")
            return code or EXIT_ERROR
        doubt = "under --ft an exit code does not prove that every rank came to its end"
        tell(f"mpitrain: warning: the script left no {path}, and {doubt}")
        return code
    result = read_json(path) or {}
    if result.get("status") == "ok":
        return EXIT_OK
    return int(result.get("exit_code") or code or EXIT_ERROR)


# A run that ended so is not started again: it is done, its input is wrong, it wants another launch later, or somebody
# wanted it to end.
_FINAL = (
    EXIT_OK,
    EXIT_USAGE,
    EXIT_TARGET_MISSED,
    EXIT_PREFLIGHT_FAILED,
    EXIT_REQUEUE,
    EXIT_INTERRUPTED,
    EXIT_ENDED_AT_ONCE,
)


def relaunch(
    once: Callable[[list[str]], Outcome],
    run_dir: Path,
    max_restarts: int,
    requests: Requests,
    is_ours: Callable[[str], bool] = lambda attempt: True,
    insists: bool = False,
) -> int:
    """Run `once([])`, and `once(["--resume", "auto"])` after each failure that left another newest checkpoint than was
    there before, with more samples than that start had begun with, and room for one more; returns the last exit code. A
    start in which a rank has died before the first step is tried once more as it was. Nothing is started again once a
    signal has asked for an end: a run that would have been is then one to run again, and how it goes on is told.
    `is_ours`: whether a start of this id is one of this launch; `insists`: faults are ordered at a rate, so that a
    start that has come no further is followed by another."""
    code = _relaunched(once, run_dir, max_restarts, requests, is_ours, insists)
    if requests.stop and code in (EXIT_INTERRUPTED, EXIT_ENDED_AT_ONCE, EXIT_REQUEUE):
        samples = progress(run_dir).samples
        goes_on = f"--run-dir {run_dir} --resume auto goes on from the checkpoint at {samples} samples"
        tell(
            f"mpitrain: ended; {goes_on if samples > 0 else 'no checkpoint was written, so a run begins anew'}"
        )
    return code


def _relaunched(
    once: Callable[[list[str]], Outcome],
    run_dir: Path,
    max_restarts: int,
    requests: Requests,
    is_ours: Callable[[str], bool],
    insists: bool,
) -> int:
    before, words, tried = progress(run_dir), list[str](), False
    outcome = once(words)
    for number in range(1, max_restarts + 1):
        newest = progress(run_dir)
        gets_on = newest != before and newest.gets_on and is_ours(newest.attempt)
        if outcome.final or outcome.code in _FINAL or not (gets_on or outcome.early or insists):
            break
        if tried and not (gets_on or insists):
            reason = "again a rank has died before the first step, which has a cause that stays"
            tell(f"mpitrain: not started again: {reason}")
            break
        if requests.stop:
            return requests.exit_code(EXIT_REQUEUE)
        if full := why_no_room(run_dir):
            tell(
                f"mpitrain: not started again: {run_dir} has no room for another checkpoint ({full}); free space, then "
                "start it again with --resume auto"
            )
            break
        origin = "as it was started, once: it had not come to its first step"
        if gets_on or insists:
            before, words = newest, ["--resume", "auto"]
            origin = f"from the checkpoint at {newest.samples} samples" if newest.samples >= 0 else "anew"
        tried = not gets_on
        tell(
            f"mpitrain: the run ended with exit code {outcome.code}; restart {number} of {max_restarts} {origin}"
        )
        outcome = once(words)
    return requests.exit_code(outcome.code)
