"""Holds the walls between the packages: who may import whom, no pickle on the wire, no bare except, small
files.

The table below *is* the plan; a new folder gets a row. Imports inside functions count like any other, because
a wall that a lazy import climbs over is no wall. `find_breaches` works on source text, so the checker itself
is tested on fabricated violations.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "mpitrain"
MAX_FILE_LINES, MAX_FUNCTION_LINES = 500, 60

# The ground that every storey stands on: errors, and the values that print as text. Standard library only.
GROUND = {"mpitrain.errors", "mpitrain.values", "mpitrain.system.folders"}
ANYTHING = {"mpitrain"}
# place -> (what of the package it may import besides itself, which third parties)
WALLS: dict[str, tuple[set[str], set[str]]] = {
    "errors": (set(), set()),
    "folders": (set(), set()),
    "text": ({"mpitrain.errors"}, set()),
    "run_directory": ({"mpitrain.system.folders"}, set()),
    "run_lock": ({"mpitrain.errors", "mpitrain.system.folders", "mpitrain.system.run_directory"}, set()),
    "effects": (set(), set()),
    "inject": (GROUND | {"mpitrain.effects"}, set()),
    "rules": (GROUND, set()),
    "codecs": (GROUND, {"torch", "numpy"}),
    "roles": (GROUND | {"mpitrain.strategies", "mpitrain.effects"}, set()),
    "mpi": (
        GROUND
        | {
            "mpitrain.effects",
            "mpitrain.reporting.environment",
            "mpitrain.system.processes",
            "mpitrain.system.rank_status",
        }
        | {"mpitrain.system.tracebacks"},
        {"mpi4py", "torch", "numpy"},
    ),
    "virtual": (GROUND | {"mpitrain.effects"}, {"torch"}),
    "model": (GROUND | {"mpitrain.strategies", "mpitrain.codecs"}, {"torch", "numpy", "safetensors"}),
    "data": (GROUND, {"torch", "h5py", "numpy", "sklearn", "hdf5plugin", "pyarrow", "PIL"}),
    "checkpoint": (
        GROUND
        | {"mpitrain.system.run_directory", "mpitrain.strategies", "mpitrain.codecs", "mpitrain.model"},
        {"torch", "numpy", "safetensors"},
    ),
    "console": (GROUND, set()),
    "report": (GROUND | {"mpitrain.reporting.console"}, set()),
    "slurm": (GROUND | {"mpitrain.system.run_directory"}, set()),
    "processes": (set(), set()),
    "tracebacks": (set(), set()),
    "rank_status": (GROUND | {"mpitrain.reporting.environment", "mpitrain.system.processes"}, set()),
    "supervision": (GROUND | {"mpitrain.system.processes", "mpitrain.system.rank_status"}, set()),
    "launch": (
        GROUND
        | {
            "mpitrain.reporting.environment",
            "mpitrain.launch.discover",
            "mpitrain.system.run_directory",
            "mpitrain.launch.supervision",
        },
        set(),
    ),
    "launchers": (GROUND, set()),
    # The roof composes everything, and still only mpi/ speaks MPI.
    "roof": (ANYTHING, {"torch", "numpy", "h5py", "safetensors", "matplotlib"}),
}
# What `mpitrain --help` imports: at module level nothing heavy, neither directly nor through a neighbour.
LIGHT = {
    *(
        "__init__",
        "__main__",
        "cli",
        "errors",
        "environment",
        "folders",
        "processes",
        "rank_status",
        "run_directory",
    ),
    *("launch", "launchers", "supervision", "mpi.register"),
}
# Rules and roles own neither a clock nor a thread nor a socket: the worlds do.
WORLDLY = {
    "time",
    "datetime",
    "threading",
    "multiprocessing",
    "subprocess",
    "socket",
    "asyncio",
    "concurrent",
    "queue",
    "select",
}
UNWORLDLY_PLACES = {"rules", "roles", "effects", "inject", "codecs", "text", "errors"}
# What turns bytes into running code, however it is spelt.
UNPICKLERS = {
    "pickle",
    "cPickle",
    "_pickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "joblib",
    "jsonpickle",
}
UNPICKLING_CALLS = {("torch", "load"), ("torch", "save"), ("pd", "read_pickle"), ("pandas", "read_pickle")}
# mpi4py's lower-case calls pickle: a rank could execute code on another, and large arrays are copied.
PICKLING = {
    *(
        "send",
        "bsend",
        "ssend",
        "isend",
        "ibsend",
        "issend",
        "recv",
        "irecv",
        "sendrecv",
        "mprobe",
        "improbe",
        "mrecv",
    ),
    *("bcast", "gather", "scatter", "allgather", "alltoall", "reduce", "allreduce", "scan", "exscan"),
    *("ibcast", "igather", "iscatter", "iallgather", "ialltoall", "ireduce", "iallreduce"),
}
COMMUNICATOR = re.compile(
    r"comm(unicator)?\d*$|^COMM_|^(Dup|Split|Split_type|Create|Create_group|Shrink|Get_parent|Merge)$", re.I
)


def find_breaches(relative: str, source: str) -> list[str]:
    """Every breach of a wall in one file of the package; `relative` is its path below `mpitrain/`."""
    tree = ast.parse(source)
    place = _place(relative)
    found = [*_import_breaches(relative, place, tree), *_call_breaches(tree)]
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            found.append(f"{node.lineno}: bare except")
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                found.append(f"{node.lineno}: {node.name} has {lines} lines, at most {MAX_FUNCTION_LINES}")
    if (lines := source.count("\n")) > MAX_FILE_LINES:
        found.append(f"1: {lines} lines, at most {MAX_FILE_LINES}")
    return [f"mpitrain/{relative}:{breach}" for breach in found]


def _place(relative: str) -> str:
    """First name of the path: the folder, or the module on the top level."""
    return relative.split("/")[0].removesuffix(".py")


def _import_breaches(relative: str, place: str, tree: ast.Module) -> Iterator[str]:
    inside, outside = WALLS.get(place, WALLS["roof"])
    allowed = inside | {f"mpitrain.{place}"}
    for name, line, at_top in _imports(relative, tree):
        top = name.split(".")[0]
        if top in UNPICKLERS:
            yield f"{line}: {top} runs what it reads; use JSON or safetensors"
        if top == "mpitrain":
            if "mpitrain" not in allowed and not any(_within(name, wall) for wall in allowed):
                yield f"{line}: {place} may not know {name}"
        elif top in sys.stdlib_module_names:
            if place in UNWORLDLY_PLACES and top in WORLDLY:
                yield f"{line}: {place} may not know {name}: time, threads and messages belong to the worlds"
        elif top not in outside:
            yield f"{line}: {place} may not know {name}"
        if (
            at_top
            and (place in LIGHT or relative == "mpi/process_group/register.py")
            and top not in sys.stdlib_module_names
            and not _is_light(name)
        ):
            yield f"{line}: {place} is imported by --help and may import {name} only inside a function"


def _is_light(name: str) -> bool:
    return name == "mpitrain" or any(_within(name, f"mpitrain.{light}") for light in LIGHT)


def _within(name: str, wall: str) -> bool:
    return name == wall or name.startswith(wall + ".")


def _imports(relative: str, tree: ast.Module) -> Iterator[tuple[str, int, bool]]:
    """(absolute name, line, whether it runs when the module itself is imported) of every import.

    `importlib.import_module("...")` counts too.
    """
    package = ["mpitrain", *relative.split("/")[:-1]]
    deferred = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or _is_type_checking(node)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        at_top = id(node) not in deferred
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, at_top
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, *(node.module or "").split(".")] if node.module else base
            # `from mpitrain import mpi` names a module, `from mpitrain.errors import UsageError` does not:
            # take both readings where the base is the package itself, for there the name is what matters.
            if base == ["mpitrain"]:
                for alias in node.names:
                    yield f"mpitrain.{alias.name}", node.lineno, at_top and alias.name != "__version__"
            else:
                yield ".".join(base), node.lineno, at_top
        elif isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__"):
            yield from (
                (str(arg.value), node.lineno, at_top)
                for arg in node.args[:1]
                if isinstance(arg, ast.Constant)
            )


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _called(node: ast.expr) -> str:
    """Last name of what is called or looked into: `comm` of `self.comm`, `Dup` of `comm.Dup()`."""
    if isinstance(node, ast.Call):
        return _called(node.func)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _call_breaches(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and node.attr in PICKLING
            and COMMUNICATOR.search(_called(node.value))
        ):
            call = f"{_called(node.value)}.{node.attr}"
            yield f"{node.lineno}: {call} pickles; use the upper-case call on a buffer"
        if isinstance(node, ast.Attribute) and (_called(node.value), node.attr) in UNPICKLING_CALLS:
            yield f"{node.lineno}: {_called(node.value)}.{node.attr} runs what it reads; use safetensors"
        if (
            isinstance(node, ast.Call)
            and _called(node) in ("eval", "exec")
            and isinstance(node.func, ast.Name)
        ):
            yield f"{node.lineno}: {node.func.id} runs what it reads"
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and not _is_false(node.value):
            yield f"{node.value.lineno}: allow_pickle runs what it reads"


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("relative", FILES)
def test_the_walls_stand(relative: str) -> None:
    assert find_breaches(relative, (PACKAGE / relative).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("relative", "source", "word"),
    [
        ("rules/a.py", "import torch", "torch"),
        ("rules/a.py", "from mpitrain.mpi import world", "mpitrain.mpi"),
        ("rules/a.py", "from mpitrain import virtual", "mpitrain.virtual"),
        ("rules/a.py", "from ..mpi import world", "mpitrain.mpi"),
        ("rules/a.py", "def f():\n    from mpitrain.roles import Server", "mpitrain.roles"),
        ("rules/a.py", "import time", "time"),
        ("rules/deep/a.py", "from ...virtual.world import VirtualWorld", "mpitrain.virtual"),
        ("codecs/a.py", "import h5py", "h5py"),
        ("codecs/a.py", "import mpitrain.effects", "mpitrain.effects"),
        ("effects.py", "from mpitrain.errors import WireError", "mpitrain.errors"),
        ("inject.py", "import time", "time"),
        ("inject.py", "from mpitrain.roles import Worker", "mpitrain.roles"),
        ("roles/a.py", "import torch", "torch"),
        ("roles/a.py", "from mpi4py import MPI", "mpi4py"),
        ("roles/a.py", "if TYPE_CHECKING:\n    from mpitrain.mpi.runtime import Runtime", "mpitrain.mpi"),
        ("roles/a.py", "import threading", "threading"),
        ("mpi/a.py", "from mpitrain.strategies import Push", "mpitrain.strategies"),
        ("mpi/a.py", "from mpitrain.virtual import world", "mpitrain.virtual"),
        ("mpi/a.py", "import h5py", "h5py"),
        ("virtual/a.py", "import mpitrain.mpi.world", "mpitrain.mpi"),
        ("virtual/a.py", "import importlib\nimportlib.import_module('mpi4py')", "mpi4py"),
        ("virtual/a.py", "from mpitrain.strategies import Push", "mpitrain.strategies"),
        ("data/a.py", "from mpitrain.mpi.runtime import start", "mpitrain.mpi"),
        ("data/a.py", "from mpi4py import MPI", "mpi4py"),
        ("report.py", "import torch", "torch"),
        ("train.py", "from mpi4py import MPI", "mpi4py"),
        ("train.py", "import pandas", "pandas"),
        ("cli/a.py", "import numpy", "inside a function"),
        ("cli/a.py", "from mpitrain.job import Overrides", "inside a function"),
        ("__init__.py", "from mpitrain import job", "inside a function"),
        ("__init__.py", "from mpitrain.mpi.runtime import start", "inside a function"),
        ("mpi/process_group/register.py", "import torch", "inside a function"),
        ("launch.py", "from mpitrain.mpi import runtime", "mpitrain.mpi"),
        ("mpi/a.py", "def f(comm):\n    comm.send(1, 0)", "pickles"),
        ("mpi/a.py", "def f(self):\n    return self._comm.bcast(1)", "pickles"),
        ("mpi/a.py", "from mpi4py import MPI\nMPI.COMM_WORLD.allgather(1)", "pickles"),
        ("mpi/a.py", "def f(comm):\n    comm.Dup().recv()", "pickles"),
        ("mpi/a.py", "def f(intercomm):\n    g = intercomm.gather", "pickles"),
        ("data/a.py", "import pickle", "runs what it reads"),
        (
            "checkpoint/a.py",
            "def f(path):\n    import torch\n    return torch.load(path)",
            "runs what it reads",
        ),
        ("data/a.py", "import numpy as np\nnp.load('x', allow_pickle=True)", "runs what it reads"),
        ("text.py", "def f(text):\n    return eval(text)", "runs what it reads"),
        ("train.py", "try:\n    f()\nexcept:\n    pass", "bare except"),
        ("train.py", "def f():\n" + "    x = 1\n" * 60, "has 61 lines"),
        ("train.py", "x = 1\n" * 501, "501 lines"),
    ],
)
def test_a_breach_is_found(relative: str, source: str, word: str) -> None:
    assert any(word in breach for breach in find_breaches(relative, source)), find_breaches(relative, source)


@pytest.mark.parametrize(
    ("relative", "source"),
    [
        (
            "rules/a.py",
            "import math\nfrom mpitrain.strategies.base import Push\nfrom mpitrain.errors import UsageError",
        ),
        ("rules/a.py", "from .base import Push"),
        ("codecs/a.py", "import struct\nimport torch.nn\nimport numpy"),
        ("roles/a.py", "from mpitrain.effects import Send\nfrom mpitrain.strategies import Push"),
        ("roles/a.py", "def f(generator):\n    generator.send(1)"),
        (
            "mpi/a.py",
            "from mpi4py import MPI\nimport torch\nfrom mpitrain.effects import Send\nimport threading",
        ),
        ("mpi/a.py", "def f(comm, engine):\n    comm.Send(1, 0)\n    engine.isend(1, 0)"),
        ("cli/a.py", "def f():\n    from mpitrain.job import Overrides\n    import torch"),
        ("training/a.py", "import torch\nfrom mpitrain.mpi import runtime\nfrom mpitrain.data import Shards"),
        ("data/a.py", "import numpy as np\nnp.load('x', allow_pickle=False)"),
        ("training/a.py", "def f(module):\n    module.eval()"),
        ("train.py", "def f():\n" + "    x = 1\n" * 59),
        ("train.py", "x = 1\n" * 500),
        ("train.py", "try:\n    f()\nexcept ValueError:\n    pass"),
    ],
)
def test_what_is_allowed_is_not_a_breach(relative: str, source: str) -> None:
    assert find_breaches(relative, source) == []


def test_there_is_something_to_check() -> None:
    assert {"errors.py", "cli/__init__.py"} <= set(FILES)
