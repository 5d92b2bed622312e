"""The one way tests start MPI ranks: `run_ranks(n, ...)` under `mpirun`, with a deadline that nothing survives.

Each launch is its own session. When the deadline passes, every rank is asked for its Python stacks
(SIGABRT, which faulthandler answers), then everything of the session is killed and the test fails with all
that was printed. After every launch, however it ended, nothing of the session may be left.

A launch whose ranks all stand inside MPI's own start at the deadline is started once more, with a warning that pytest
shows: that is rare, not of our making, and what is tested has not begun.

Ranks are forked from a process that stays up between test files and has imported torch (`rank_pool/`), each in a
session of its own: importing it takes most of the time of a short launch. This file imports the stdlib and pytest only,
and of the package, when it is asked for a launcher, what finds them.

Which MPI: that of the Python that runs pytest, whichever it is. A launch that names another one, or options of another
one's launcher, is skipped with the reason.
"""

import contextlib
import functools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.rank_pool.pool import may_be_warm, pool_of

OWN = "own"  # the MPI of the Python that runs pytest
ROOT = Path(__file__).resolve().parents[1]
# Open MPI looks for a fabric and sleeps for a second where there is none, in every MPI_Init. And there are more ranks
# than cores: one that waits is to leave them to those that compute, also to those of the files of tests beside it.
# Intel's launcher binds ranks to cores, those of two launches that live at once to the same ones.
SETTINGS = {
    "OMPI_MCA_btl": "^ofi",
    "OMPI_MCA_threads_pthreads_yield_strategy": "nanosleep",
    "I_MPI_PIN": "off",
}
_OF_5 = {"--with-ft", "--prtemca"}  # options that the mpirun of Open MPI 4 does not know
_TAG = re.compile(r"\[\d+,(\d+)\]<std(?:out|err)>: ?")  # Open MPI's, also in the middle of a line
_FOREIGN = (
    "OMPI_",
    "PMIX_",
    "PMI_",
    "PRTE_",
    "HYDRA_",
    "MPI4PY_",
    "MPITRAIN_",
)  # what an outer launch would leak
# Open MPI names a launch's shared memory by 16 bits of a hash: one in 65,536 pairs of launches that live at once writes
# into each other's, and then one of them crashes and the other hangs. `conftest.py` sets this to a folder for each
# process that runs tests.
SEGMENTS_FOLDER = "OMPI_MCA_btl_sm_backing_directory"
# The top of a stack that faulthandler prints, inside the C code of an extension that is being imported: mpi4py's
# starts MPI.
_IN_MPI_START = re.compile(
    r'most recent call first\):\n +File "<frozen importlib\S+", line \d+ in _call_with_'
)
# What faulthandler prints besides the program's own frames.
_NOISE = re.compile(
    r"^(?:.*<frozen (?:importlib|runpy)\S+\", line .*|.*Extension modules: .*)\n", re.MULTILINE
)


class RanksHung(AssertionError):
    """The launch passed its deadline, or left processes behind; the message holds everything that was printed, and so
    does `result`, whose code is no exit code."""

    result: "Result"


@dataclass(frozen=True)
class Result:
    """How a launch ended. `stdout` and `stderr` are the launcher's, without rank tags; `ranks_out[r]` and
    `ranks_err[r]` are what rank r printed (empty where the launcher cannot tell)."""

    command: tuple[str, ...]
    code: int
    stdout: str
    stderr: str
    ranks_out: tuple[str, ...]
    ranks_err: tuple[str, ...]
    seconds: float

    def check(self) -> "Result":
        """Assert exit code 0, showing the output otherwise; returns itself."""
        assert self.code == 0, f"exit code {self.code}\n{self}"
        return self

    def __str__(self) -> str:
        stderr = _NOISE.sub("", self.stderr)
        return f"$ {' '.join(self.command)}\n--- stdout\n{self.stdout}\n--- stderr\n{stderr}"


def run_ranks(
    n: int,
    script_or_argv: str | Path | Sequence[str],
    *,
    timeout_s: float = 180,
    env: Mapping[str, str] | None = None,
    mpirun_args: Sequence[str] = (),
    mpi: str = OWN,
    cwd: str | Path | None = None,
    warm: bool = True,
) -> Result:
    """Run n ranks and return how they ended.

    `script_or_argv`: a path of a Python file, Python source text (anything with a newline), or a whole
    command line. `env` is added to a clean environment with one torch thread per rank. `mpirun_args` are Open
    MPI's, and skip the test under any other. `mpi="mpich"`, where that is not the MPI of this Python, needs a second
    environment, named by MPITRAIN_MPICH_VENV, and skips the test with the reason where it is absent. `warm=False` has
    the launcher start the program itself, for tests of that. Raises RanksHung.
    """
    result, hung = _launch(n, script_or_argv, timeout_s, env or {}, mpirun_args, mpi, cwd, warm)
    if hung and held_in_mpi_start(result):
        warnings.warn(
            f"all ranks stood inside MPI's start, and were started again: {hung}\n{result}", stacklevel=2
        )
        result, hung = _launch(n, script_or_argv, timeout_s, env or {}, mpirun_args, mpi, cwd, warm)
    if hung:
        error = RanksHung(f"{hung}\n{result}")
        error.result = result
        raise error
    return result


def held_in_mpi_start(result: Result) -> bool:
    """Whether every rank was importing an extension, as mpi4py's does until MPI has started, when it was asked for its
    stack."""
    return all(_IN_MPI_START.search(text) for text in result.ranks_err)


def _launch(
    n: int,
    script_or_argv: str | Path | Sequence[str],
    timeout_s: float,
    env: Mapping[str, str],
    mpirun_args: Sequence[str],
    mpi: str,
    cwd: str | Path | None,
    warm: bool,
) -> tuple[Result, str]:
    """How one launch ended, and why it had to be killed."""
    python, mpirun = find_mpi(mpi)
    kind = kind_of(mpirun)
    if mpirun_args and (kind != "openmpi" or is_old(mpirun) and not _OF_5.isdisjoint(mpirun_args)):
        pytest.skip(f"starts ranks with options of Open MPI's mpirun: {' '.join(mpirun_args)}")
    with tempfile.TemporaryDirectory(prefix="ranks-") as scratch:
        argv = _argv(script_or_argv, python, Path(scratch))
        (ranks := Path(scratch) / "ranks").mkdir()
        if warm and may_be_warm(python, argv, env):
            argv = pool_of(python, _environment({})).client(str(ranks), argv[1:])
        command = [str(mpirun), *_launcher_args(mpirun, scratch), *mpirun_args, "-n", str(n), *argv]
        started_s = time.monotonic()
        full = _environment({**SETTINGS, **env})
        code, out, err, hung = _run(command, full, timeout_s, cwd, ranks)
        seconds = time.monotonic() - started_s
        ranks_out, out = _by_rank(out, n) if kind == "openmpi" else _from_files(out, n, f"{scratch}/out")
        ranks_err, err = _by_rank(err, n) if kind == "openmpi" else _from_files(err, n, f"{scratch}/err")
    return Result(tuple(command), code, out, err, ranks_out, ranks_err, seconds), hung


def run_plain(
    command: Sequence[str], *, cwd: str | Path | None = None, code: int = 0, timeout_s: float = 280
) -> str:
    """Run a command that starts its own ranks, or none, under the same deadline; returns its stdout."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as ranks:
        env = warm_environment(_environment(SETTINGS), Path(ranks))
        got, out, err, hung = _run(list(command), env, timeout_s, cwd, Path(ranks))
    assert got == code and not hung, (
        f"{hung or f'exit code {got}, wanted {code}'}\n$ {' '.join(command)}\n--- stdout\n{out}\n--- stderr\n{err}"
    )
    return out


def warm_environment(env: Mapping[str, str], ranks: Path, mpi: str = OWN) -> dict[str, str]:
    """`env` with what makes the ranks warm that are started in it, by whatever launcher; `ranks` is an empty folder,
    or none, where each of them leaves a file with its number: it leads a session of its own."""
    python = Path(sys.executable) if mpi == OWN else find_mpi(mpi)[0]
    return pool_of(python, _environment({})).variables(str(ranks), env)


def warm_command(argv: Sequence[str], ranks: Path) -> list[str]:
    """The command that runs `python *argv` in a warm process; `ranks` is as above."""
    return pool_of(Path(sys.executable), _environment({})).client(str(ranks), argv)


def find_mpi(mpi: str = OWN) -> tuple[Path, Path]:
    """(python, mpirun) of the wanted MPI; skips the test with the reason where there is none."""
    own, why_not = _own_mpirun()
    kind = kind_of(own) if own else ""
    if own and mpi in (OWN, kind):
        return Path(sys.executable), own
    if mpi == "mpich":
        venv = os.environ.get("MPITRAIN_MPICH_VENV")
        if not venv or not (Path(venv) / "bin" / "mpiexec").exists():
            pytest.skip("no MPICH: set MPITRAIN_MPICH_VENV to an environment with mpich, mpi4py and torch")
        return Path(venv) / "bin" / "python", Path(venv) / "bin" / "mpiexec"
    pytest.skip(f"needs Open MPI, and this Python has {kind}" if own else why_not)


@functools.cache
def _own_mpirun() -> tuple[Path | None, str]:
    """The launcher of this Python's MPI outside of any batch system, and why there is none."""
    from mpitrain.errors import UsageError
    from mpitrain.launch.discover import find_launcher

    seen = {name: value for name, value in os.environ.items() if name == "PATH" or name.startswith("MPI4PY_")}
    try:
        return Path(find_launcher(environ=seen).path), ""
    except UsageError as error:
        return None, str(error)


@functools.cache
def kind_of(mpirun: Path) -> str:
    """Whose command line a launcher speaks, as the package calls it: `"openmpi"`, or `"mpich"` of MPICH and its kin."""
    from mpitrain.launch.discover import launcher_flavour

    return launcher_flavour(str(mpirun)) or "of a kind that this package does not know"


@functools.cache
def is_old(mpirun: Path) -> bool:
    """Whether it is the launcher of Open MPI 4 or older, which has options of its own."""
    from mpitrain.launch.discover import is_before_5

    return is_before_5(str(mpirun))


def needs_open_mpi(why: str) -> None:
    """Skip the test where this Python has another MPI, or none. `why`: what of Open MPI it is about."""
    kind = kind_of(find_mpi()[1])
    if kind != "openmpi":
        pytest.skip(f"{why}, and this Python has {kind}")


def is_intel(mpi: str = OWN) -> bool:
    """Whether that MPI is Intel's, which speaks MPICH's command line (`make test-intel`)."""
    return (find_mpi(mpi)[1].parent / "impi_info").exists()


def _launcher_args(mpirun: Path, scratch: str) -> list[str]:
    if kind_of(mpirun) == "openmpi":
        tagged = ["--tag-output", "--bind-to", "none"] if is_old(mpirun) else ["--output", "tag"]
        return ["--oversubscribe", *tagged]
    # MPICH's own tags (-l) are told from the text of a rank by nothing
    return ["-outfile-pattern", f"{scratch}/out.%r", "-errfile-pattern", f"{scratch}/err.%r"]


def _argv(script_or_argv: str | Path | Sequence[str], python: Path, scratch: Path) -> list[str]:
    if isinstance(script_or_argv, Path):
        return [str(python), str(script_or_argv)]
    if not isinstance(script_or_argv, str):
        return list(script_or_argv)
    if "\n" not in script_or_argv:
        return [str(python), script_or_argv]
    path = scratch / "script.py"
    path.write_text(script_or_argv)
    return [str(python), str(path)]


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    clean = {
        key: value
        for key, value in os.environ.items()
        if key == SEGMENTS_FOLDER or not key.startswith(_FOREIGN)
    }
    path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "tests"), clean.get("PYTHONPATH", "")]))
    return clean | {
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": path,
        **extra,
    }


def _run(
    command: list[str],
    env: dict[str, str],
    timeout_s: float,
    cwd: str | Path | None,
    warm_ranks: Path | None = None,
) -> tuple[int, str, str, str]:
    """(exit code, stdout, stderr, why it had to be killed)."""
    # Files, not pipes: a rank that outlives its launcher would keep a pipe open and the reader waiting.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        launcher = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=env,
            cwd=cwd,
            start_new_session=True,
        )
        hung = ""
        try:
            launcher.wait(timeout_s)
        except subprocess.TimeoutExpired:
            sessions = _sessions(launcher.pid, warm_ranks)
            hung = f"no end within {timeout_s} s; living: {_standing(*sessions)}"
            _ask_for_stacks(sessions)
        finally:
            left = _kill_sessions(launcher.pid, warm_ranks, grace_s=0 if hung else 5)
            code = launcher.wait()
        if left and not hung:
            hung = f"exit code {code}, but processes were left: {left}"
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read())
    return code, texts[0], texts[1], hung


def members(*sessions: int) -> dict[int, str]:
    """Living processes of these sessions: pid -> command name. Open MPI gives each rank its own process group, so the
    session is what holds a launch together."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            name, rest = (entry / "stat").read_text().rsplit(")", 1)
        except OSError:  # it has just ended
            continue
        state, _, _, its_session = rest.split()[:4]
        if int(its_session) in sessions and state not in "ZX":
            found[int(entry.name)] = name.split("(", 1)[1]
    return found


def living(launcher: int, ranks: Path) -> dict[int, str]:
    """Living processes of a launch: pid -> command name; `ranks` is what `warm_environment` was given."""
    return members(*_sessions(launcher, ranks))


def _standing(*sessions: int) -> str:
    """What the living processes of these sessions are, and where in the kernel each of their threads waits."""
    lines = []
    for pid, name in members(*sessions).items():
        waits = []
        for thread in Path(f"/proc/{pid}/task").glob("*/wchan"):
            with contextlib.suppress(OSError):
                waits.append(thread.read_text() or "?")
        lines.append(f"{pid} {name} ({', '.join(waits)})")
    return "; ".join(lines)


def _sessions(launcher: int, warm_ranks: Path | None) -> list[int]:
    """The launcher's session and those of the warm ranks that were forked for it so far."""
    return [launcher, *(int(path.name) for path in (warm_ranks.iterdir() if warm_ranks else ()))]


def _ask_for_stacks(sessions: Sequence[int]) -> None:
    """SIGABRT to the Python ranks; the launcher lives on for a moment to pass their stacks through."""
    pythons = [pid for pid, name in members(*sessions).items() if name.startswith(("python", "mpitrain"))]
    for pid in pythons:
        _signal(pid, signal.SIGABRT)
    deadline_s = time.monotonic() + 3
    while time.monotonic() < deadline_s and len(members(*sessions)) > 0:
        time.sleep(0.05)


def _kill_sessions(launcher: int, warm_ranks: Path | None, grace_s: float) -> str:
    """Kill what is left after `grace_s`, and return what had to be killed, and in what it stood."""
    deadline_s = time.monotonic() + grace_s
    while (left := members(*_sessions(launcher, warm_ranks))) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    told = _standing(*_sessions(launcher, warm_ranks)) if left else ""
    while left:
        for pid in left:
            _signal(pid, signal.SIGKILL)
        time.sleep(0.01)
        left = members(*_sessions(launcher, warm_ranks))
    return told


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _by_rank(text: str, n: int) -> tuple[tuple[str, ...], str]:
    """Split tagged output: what each rank printed, and the whole without tags. Lines without a tag are the
    launcher's own."""
    ranks = [""] * n
    whole = ""
    for line in text.splitlines(keepends=True):
        before, *tagged = _TAG.split(line)  # untagged, rank, text, rank, text, ...
        whole += before + "".join(tagged[1::2])
        for rank, piece in zip(tagged[0::2], tagged[1::2]):
            if int(rank) < n:
                ranks[int(rank)] += piece
    return tuple(ranks), whole


def _from_files(text: str, n: int, stem: str) -> tuple[tuple[str, ...], str]:
    """The same from one file a rank; `text` is what the launcher printed itself."""
    paths = [Path(f"{stem}.{rank}") for rank in range(n)]
    ranks = tuple(path.read_text() if path.exists() else "" for path in paths)
    return ranks, text + "".join(ranks)
