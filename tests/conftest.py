"""What every test session shares: few threads, repeatable properties, and a count of what could not run here.

A test that needs what this machine lacks (a GPU, Slurm, MPICH) is skipped with that reason; the session's
last lines say how many, so that a green run on a laptop does not read like a green run everywhere.
"""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator

import hypothesis
import pytest

from tests.ranks import SEGMENTS_FOLDER, SETTINGS, warm_environment

# Before torch is imported, and for every process a test starts: ranks share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
for _name, _value in SETTINGS.items():
    os.environ.setdefault(_name, _value)
# What tests compare with was computed on the host, often to the bit; `make gpu` names the accelerator that may be used.
if os.environ.get("MPITRAIN_TEST_DEVICE") in (None, "sim"):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
# A shell that asks Python to write no bytecode would have every process compile the package, and pytest all the tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Tests behave alike inside an allocation or under mpirun: what a launcher left in the environment is removed.
_LEFT_BY_LAUNCHERS = (
    "OMPI_COMM_",
    "PMIX_",
    "PMI_",
    "SLURM_",
    "MPITRAIN_FT",
    "MPITRAIN_RUN_DIR",
    "MPITRAIN_TERMINAL",
)
for _name in list(os.environ):
    if _name.startswith(_LEFT_BY_LAUNCHERS):
        del os.environ[_name]

# A shell that runs the tests in the background, and nohup, have their children ignore signals, which tests send.
for _number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)

# Two mpiruns that begin and end at once trip over each other's session folders ("The PMIx server's listener thread
# failed to start"), so each of the processes that run files side by side has a folder of its own for what is temporary.
if "PYTEST_XDIST_WORKER" in os.environ:
    tempfile.tempdir = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix=os.environ["PYTEST_XDIST_WORKER"])
    os.chmod(os.environ["TMPDIR"], 0o755)  # a test looks at files as somebody else
    atexit.register(shutil.rmtree, os.environ["TMPDIR"], ignore_errors=True)
if os.path.isdir("/dev/shm"):
    os.environ[SEGMENTS_FOLDER] = tempfile.mkdtemp(prefix="mpitrain-tests-", dir="/dev/shm")
    atexit.register(shutil.rmtree, os.environ[SEGMENTS_FOLDER], ignore_errors=True)

# The same examples in every run: what fails elsewhere can be repeated here. Times are for benchmarks.
hypothesis.settings.register_profile("mpitrain", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("mpitrain")


_ASKING = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1)


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """A test that runs `mpitrain train` in this process leaves signals held back and ignored, as the end of a process
    does, and what later tests start would inherit that."""
    mask, handlers = signal.pthread_sigmask(signal.SIG_BLOCK, ()), [*map(signal.getsignal, _ASKING)]
    yield
    for number, handler in zip(_ASKING, handlers, strict=True):
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@pytest.fixture(autouse=True, scope="module")
def frozen_leftovers() -> None:
    """What was collected, and what earlier files have left, stays to the end: a million objects and more, which neither
    the garbage collector need walk through in every test, nor who asks it for all that live."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def warm_children(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks and commands are warm, too, that a test starts by itself or has mpitrain start."""
    kept = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    for name, value in warm_environment(kept, tmp_path_factory.mktemp("ranks")).items():
        monkeypatch.setenv(name, value)


# What mostly waits: for ranks, for a silence to be noticed, for a job to be scheduled.
_WAITING = ("tests/slurm/", "tests/mpi/", "tests/launch/")
# Of the others those that are long.
_LONG = (
    "tests/test_",
    "tests/virtual/",
    "tests/training/",
    "tests/threads/",
    "tests/torch_suite/",
    "tests/suites/",
    "tests/search/",
    "tests/hostile/",
    "tests/data/",
    "tests/doctor/",
    "tests/model/",
    "tests/strategies/",
)
_WAITING_ENDS = 0.85  # of the way through all files


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where files are run side by side, those that mostly wait are dealt out among those that compute, or the cores
    would be idle at first, and too few after that. Of each kind what is long comes first, and the many short tests
    fill the gaps at the end."""
    files = list(dict.fromkeys(_file_of(item) for item in items))
    waiting = [file for file in files if file.startswith(_WAITING)]
    computing = [file for file in files if file not in waiting]
    place: dict[str, float] = {}
    for kind, starts, end in ((waiting, _WAITING, _WAITING_ENDS), (computing, _LONG, 1.0)):
        kind.sort(key=lambda file: next((i for i, start in enumerate(starts) if file.startswith(start)), 99))
        place |= {file: end * number / len(kind) for number, file in enumerate(kind)}
    items.sort(key=lambda item: place[_file_of(item)])


def _file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def skip_counts(reports: list[pytest.TestReport]) -> Counter[str]:
    """How many tests were skipped for each reason."""
    reasons: Counter[str] = Counter()
    for report in reports:
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reasons[text.removeprefix("Skipped: ")] += 1
    return reasons


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say at the end what could not run here, and why."""
    reasons = skip_counts(terminalreporter.stats.get("skipped", []))
    if reasons:
        terminalreporter.section(f"{sum(reasons.values())} not run here")
        for reason, count in reasons.most_common():
            terminalreporter.line(f"{count:4}  {reason}")
