"""Holds the walls between the packages: who may import whom, no circle of imports, no pickle on the wire, no bare
except, small files.

The table below *is* the plan; a new folder gets a row. Imports inside functions count like any other, because a wall
that a lazy import climbs over is no wall; those under `TYPE_CHECKING`, too: files that name each other's types are read
together, and a protocol in the lower one ends that.
`find_breaches` and `find_circles` work on source text, so the checker itself is tested on fabricated violations.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "mpitrain"
MAX_FILE_LINES, MAX_FUNCTION_LINES = 500, 60

# The floors, the lowest first. A place (a folder or a module directly under `mpitrain/`) imports from lower floors
# only, never from another place of its own floor; what third parties it may import stands beside it.
FLOORS: tuple[dict[str, set[str]], ...] = (
    {"errors": set(), "messages": set(), "one_at_a_time": set(), "torch_versions": {"torch"}},
    {"values": set(), "effects": set(), "system": set(), "torch_backend": {"torch"}},
    {"codecs": {"torch", "numpy"}, "devices": {"torch"}},
    {
        "strategies": set(),
        "data": {"torch", "h5py", "numpy", "sklearn", "hdf5plugin", "pyarrow", "PIL"},
        "mpi": {"mpi4py", "torch", "numpy"},
        "virtual": {"torch", "numpy"},
        "threads": {"torch"},
        "inject": set(),
        "launch": set(),
        "slurm": set(),
        "options": set(),
        "embedding": {"torch", "numpy"},
    },
    {
        "model": {"torch"},
        "checkpoint": {"torch", "safetensors", "numpy"},
        "reporting": {"torch", "matplotlib", "mlflow", "wandb"},
        "doctor": {"torch", "numpy", "h5py"},
    },
    {"roles": set(), "job": {"torch"}},
    {"training": {"torch", "safetensors", "torchao", "onnxruntime"}},
    {
        "wrapping": {"torch"},
        "simulation": {"torch", "numpy"},
    },
    {
        "planning": {"torch"},
        "search": {"torch", "optuna"},
        "frameworks": {
            "torch",
            "lightning",
            "lightning_fabric",
            "pytorch_lightning",
            "accelerate",
            "transformers",
        },
    },
    {"cli": set()},
    {"__init__": set(), "__main__": set()},
)
FLOOR = {place: number for number, floor in enumerate(FLOORS) for place in floor}
# What lies lower and yet must not be known: a role is handed an opaque store, and the worlds carry its messages.
UNKNOWN = {"roles": {"mpi", "virtual", "threads", "model", "codecs", "data", "checkpoint"}}
# What some may know of a lower place, and no more: a strategy has a codec among its fields, and never sees a message.
# The registry names the files of all codecs.
IN_PART = {("strategies", "codecs"): {"codecs.base", "codecs.none"}}
# What `mpitrain --help` imports, and reading a strategy's text: at module level nothing heavy, neither directly nor
# through a neighbour.
LIGHT = {
    *("__init__", "__main__", "cli", "errors", "system", "launch"),
    *(
        "torch_backend",
        "torch_versions",
        "strategies.registry",
        "values",
        "one_at_a_time",
        "codecs",
        "job.option",
        "job.overrides",
    ),
}
# Strategies and roles own neither a clock nor a thread nor a socket: the worlds do.
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
UNWORLDLY_PLACES = {"strategies", "roles", "effects", "messages", "inject", "codecs", "values", "errors"}
# The one file that starts threads: it hands what goes wrong in them to the run.
STARTS_THREADS = "system/background.py"
# The place that asks torch for devices, whatever they are called, and the one that asks MPI.
NAME_DEVICES = ("devices/", "mpi/memory/device_aware.py")
# How many lines of others say "cuda": examples in help and in messages, the names of others' back ends, a variable.
NAMED_DEVICES = {
    "job/job.py": 2,
    "job/option.py": 2,
    "job/overrides.py": 1,
    "mpi/process_group/mixed_group.py": 1,
    "reporting/environment.py": 1,
    "slurm/site.py": 1,
    "torch_backend.py": 3,
    "training/measure.py": 1,
}
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
# The one file that asks which torch there is, and that takes names of torch that begin with an underscore.
KNOWS_VERSIONS = "torch_versions.py"
PUBLIC_ALL_THE_SAME = re.compile(r"__\w+__$|_foreach_")  # torch documents the latter
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
    if relative != KNOWS_VERSIONS:
        found += _version_breaches(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            found.append(f"{node.lineno}: bare except")
        starts_thread = isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Thread")
        if starts_thread and relative != STARTS_THREADS:
            found.append(f"{node.lineno}: a thread that fails alone; use system/background.py")
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                found.append(f"{node.lineno}: {node.name} has {lines} lines, at most {MAX_FUNCTION_LINES}")
    if (lines := source.count("\n")) > MAX_FILE_LINES:
        found.append(f"1: {lines} lines, at most {MAX_FILE_LINES}")
    said = [number for number, line in enumerate(source.splitlines(), 1) if "cuda" in line.lower()]
    if not relative.startswith(NAME_DEVICES) and len(said) > (most := NAMED_DEVICES.get(relative, 0)):
        found.append(f"{said[0]}: {len(said)} lines say cuda, at most {most}: ask devices/accelerator.py")
    return [f"mpitrain/{relative}:{breach}" for breach in found]


def _place(relative: str) -> str:
    """First name of the path: the folder, or the module on the top level."""
    return relative.split("/")[0].removesuffix(".py")


def _import_breaches(relative: str, place: str, tree: ast.Module) -> Iterator[str]:
    for name, line, at_top in _imports(relative, tree):
        top = name.split(".")[0]
        if top in UNPICKLERS:
            yield f"{line}: {top} runs what it reads; use JSON or safetensors"
        if top == "mpitrain":
            if why := _why_not(place, name):
                yield f"{line}: {place} may not know {name}: {why}"
        elif top in sys.stdlib_module_names:
            if place in UNWORLDLY_PLACES and top in WORLDLY:
                yield f"{line}: {place} may not know {name}: time, threads and messages belong to the worlds"
        elif place in FLOOR and top not in FLOORS[FLOOR[place]][place]:
            yield f"{line}: {place} may not know {name}"
        if (
            at_top
            and _is_light(_module(relative))
            and top not in sys.stdlib_module_names
            and not _is_light(name)
        ):
            yield f"{line}: {place} is imported by --help and may import {name} only inside a function"


def _why_not(place: str, name: str) -> str:
    """Why `place` may not import `name`; empty if it may."""
    known = (name.split(".") + ["__init__"])[1]
    if known in (place, "__init__", "__version__"):
        return ""
    if place not in FLOOR or known not in FLOOR:
        return "it has no floor yet"
    if FLOOR[known] >= FLOOR[place]:
        return "it is no lower floor"
    if name.removeprefix("mpitrain.") not in IN_PART.get((place, known), {name.removeprefix("mpitrain.")}):
        return "it is no part of that which may be known here"
    return "messages are the worlds' affair, tensors the store's" if known in UNKNOWN.get(place, ()) else ""


def _module(relative: str) -> str:
    """The dotted name of a file of the package."""
    return "mpitrain." + relative.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def find_circles(sources: dict[str, str]) -> list[str]:
    """Circles of imports between files, and between folders that lie in the same folder; `sources` by path below
    `mpitrain/`. A package's `__init__.py` only gathers names, and makes no circle."""
    modules = {_module(path): path for path in sources if not path.endswith("__init__.py")}
    files: dict[str, set[str]] = {name: set() for name in modules}
    folders: dict[str, set[str]] = {}
    for name, path in modules.items():
        tree = ast.parse(sources[path])
        for imported, _, _ in _imports(path, tree, with_names=True):
            if imported in modules and imported != name:
                files[name].add(imported)
                ours, theirs = name.split(".")[1:-1], imported.split(".")[1:-1]
                shared = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), None)
                if shared is not None:  # siblings: the folders in which the two paths part
                    first, second = (".".join(parts[: shared + 1]) for parts in (ours, theirs))
                    folders.setdefault(first, set()).add(second)
    return [*_circles(files), *_circles(folders)]


def _circles(graph: dict[str, set[str]]) -> list[str]:
    found: list[str] = []
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> None:
        if name in path:
            found.append(" -> ".join([*path[path.index(name) :], name]))
        elif name not in done:
            for known in sorted(graph.get(name, ())):
                visit(known, [*path, name])
            done.add(name)

    for name in sorted(graph):
        visit(name, [])
    return found


def _is_light(name: str) -> bool:
    return name == "mpitrain" or any(_within(name, f"mpitrain.{light}") for light in LIGHT)


def _within(name: str, wall: str) -> bool:
    return name == wall or name.startswith(wall + ".")


def _imports(relative: str, tree: ast.Module, with_names: bool = False) -> Iterator[tuple[str, int, bool]]:
    """(absolute name, line, whether it runs when the module itself is imported) of every import; `with_names`: what
    `from package import name` names, too, since it may be a module.

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
                if with_names:
                    yield from ((".".join([*base, alias.name]), node.lineno, at_top) for alias in node.names)
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


def _version_breaches(tree: ast.Module) -> Iterator[str]:
    """Questions about the version of torch, and names of torch that are private."""
    bound: set[str] = set()  # names that stand for a part of torch
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None) or ""
            for alias in node.names:
                whole = f"{module}.{alias.name}".strip(".")
                if not getattr(node, "level", 0) and whole.split(".")[0] == "torch":
                    bound.add(alias.asname or (alias.name if module else "torch"))
                    if any(_is_private(part) for part in whole.split(".")):
                        yield f"{node.lineno}: {whole} is private to torch: {KNOWS_VERSIONS}"
        elif node in tree.body and isinstance(node, ast.Assign | ast.AnnAssign) and node.value:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if _parts(node.value)[0] in bound:
                bound |= {target.id for target in targets if isinstance(target, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (parts := _parts(node))[0] in bound:
            if _is_private(node.attr):
                yield f"{node.lineno}: {'.'.join(parts)} is private to torch: {KNOWS_VERSIONS}"
            if parts == ["torch", "__version__"]:
                yield f"{node.lineno}: {'.'.join(parts)} asks for torch's version: {KNOWS_VERSIONS}"
        elif isinstance(node, ast.Call) and node.args and _parts(node.args[0])[0] in bound:
            asks = _called(node) in ("hasattr", "signature") or (
                _called(node) == "getattr" and len(node.args) > 2
            )
            if asks:
                yield f"{node.lineno}: {ast.unparse(node)} asks what this torch has: {KNOWS_VERSIONS}"


def _is_private(name: str) -> bool:
    return name.startswith("_") and not PUBLIC_ALL_THE_SAME.match(name)


def _parts(node: ast.AST) -> list[str]:
    """["torch", "optim"] of `torch.optim`; [""] of what is no chain of names."""
    if isinstance(node, ast.Attribute):
        return [*_parts(node.value), node.attr]
    return [node.id] if isinstance(node, ast.Name) else [""]


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("relative", FILES)
def test_the_walls_stand(relative: str) -> None:
    assert find_breaches(relative, (PACKAGE / relative).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("relative", "source", "word"),
    [
        ("strategies/a.py", "import torch", "torch"),
        ("strategies/a.py", "from mpitrain.mpi import world", "mpitrain.mpi"),
        ("strategies/a.py", "from mpitrain import virtual", "mpitrain.virtual"),
        ("strategies/a.py", "from ..mpi import world", "mpitrain.mpi"),
        ("strategies/a.py", "def f():\n    from mpitrain.roles import Server", "mpitrain.roles"),
        ("strategies/a.py", "import time", "time"),
        ("strategies/deep/a.py", "from ...virtual.world import VirtualWorld", "mpitrain.virtual"),
        ("codecs/a.py", "import h5py", "h5py"),
        ("codecs/a.py", "import mpitrain.strategies", "mpitrain.strategies"),
        ("codecs/a.py", "import torch", "inside a function"),
        ("codecs/a.py", "import numpy as np", "inside a function"),
        ("strategies/a.py", "from mpitrain.codecs.topk import TopKEncoder", "no part"),
        ("strategies/a.py", "from mpitrain.codecs import add_message", "no part"),
        ("roles/a.py", "from mpitrain.model import flat", "the store's"),
        ("rooms/a.py", "from mpitrain.data import Shards", "no floor"),
        ("effects.py", "from mpitrain.values import Value", "mpitrain.values"),
        ("inject/a.py", "import time", "time"),
        ("inject/a.py", "from mpitrain.roles import Worker", "mpitrain.roles"),
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
        ("slurm/a.py", "import torch", "torch"),
        ("training/a.py", "from mpi4py import MPI", "mpi4py"),
        ("training/a.py", "import pandas", "pandas"),
        ("cli/a.py", "import numpy", "inside a function"),
        ("cli/a.py", "from mpitrain.job import Overrides", "inside a function"),
        ("__init__.py", "from mpitrain import job", "inside a function"),
        ("__init__.py", "from mpitrain.mpi.runtime import start", "inside a function"),
        ("torch_backend.py", "import torch", "inside a function"),
        ("launch/a.py", "from mpitrain.mpi import runtime", "mpitrain.mpi"),
        ("mpi/a.py", "import torch\nprint(torch.__version__)", "asks for torch's version"),
        ("data/a.py", "import torch\nif hasattr(torch.optim, 'Muon'):\n    pass", "asks what this torch has"),
        (
            "model/a.py",
            "from torch import optim\nfound = getattr(optim, 'Muon', None)",
            "asks what this torch has",
        ),
        (
            "training/a.py",
            "import inspect, torch.nn as nn\ninspect.signature(nn.Linear)",
            "asks what this torch has",
        ),
        (
            "mpi/a.py",
            "import torch.distributed as dist\ndist.distributed_c10d._world = 1",
            "private to torch",
        ),
        ("mpi/a.py", "from torch.utils import _pytree", "private to torch"),
        ("mpi/a.py", "from torch._C._distributed_c10d import Work", "private to torch"),
        ("model/a.py", "import torch\n_T = torch.Tensor\nprint(_T._typed_storage)", "private to torch"),
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
        ("values.py", "def f(text):\n    return eval(text)", "runs what it reads"),
        ("training/a.py", "try:\n    f()\nexcept:\n    pass", "bare except"),
        ("training/a.py", "def f():\n" + "    x = 1\n" * 60, "has 61 lines"),
        ("training/a.py", "x = 1\n" * 501, "501 lines"),
        ("training/a.py", "def f(tensor):\n    return tensor.is_cuda", "ask devices"),
        ("training/measure.py", "device = 'cuda'\nother = 'cuda:1'", "2 lines say cuda, at most 1"),
    ],
)
def test_a_breach_is_found(relative: str, source: str, word: str) -> None:
    assert any(word in breach for breach in find_breaches(relative, source)), find_breaches(relative, source)


@pytest.mark.parametrize(
    ("relative", "source"),
    [
        (
            "strategies/a.py",
            "import math\nfrom mpitrain.strategies.base import Push\nfrom mpitrain.errors import UsageError",
        ),
        ("strategies/a.py", "from .base import Push"),
        ("codecs/a.py", "import struct\nfrom mpitrain.codecs.lazy import np, torch"),
        ("codecs/a.py", "if TYPE_CHECKING:\n    import torch.nn\n    import numpy"),
        ("strategies/a.py", "from mpitrain.codecs.base import Codec"),
        ("roles/a.py", "from mpitrain.effects import Send\nfrom mpitrain.strategies import Push"),
        ("roles/a.py", "def f(generator):\n    generator.send(1)"),
        (
            "mpi/a.py",
            "from mpi4py import MPI\nimport torch\nfrom mpitrain.effects import Send\nimport threading",
        ),
        ("mpi/a.py", "def f(comm, engine):\n    comm.Send(1, 0)\n    engine.isend(1, 0)"),
        ("torch_versions.py", "def f():\n    import torch\n    print(torch.__version__, torch._C)"),
        ("model/a.py", "import torch\ntorch._foreach_add_([], 1)\nkind = getattr(torch, name)"),
        ("cli/a.py", "def f():\n    from mpitrain.job import Overrides"),
        ("training/a.py", "import torch\nfrom mpitrain.mpi import runtime\nfrom mpitrain.data import Shards"),
        ("data/a.py", "import numpy as np\nnp.load('x', allow_pickle=False)"),
        ("training/a.py", "def f(module):\n    module.eval()"),
        ("training/a.py", "def f():\n" + "    x = 1\n" * 59),
        ("training/a.py", "x = 1\n" * 500),
        ("training/a.py", "try:\n    f()\nexcept ValueError:\n    pass"),
        ("devices/a.py", "kind = 'cuda'"),
    ],
)
def test_what_is_allowed_is_not_a_breach(relative: str, source: str) -> None:
    assert find_breaches(relative, source) == []


def test_no_imports_run_in_a_circle() -> None:
    assert find_circles({path: (PACKAGE / path).read_text(encoding="utf-8") for path in FILES}) == []


@pytest.mark.parametrize(
    ("sources", "circle"),
    [
        (
            {"a/x.py": "import mpitrain.a.y", "a/y.py": "def f():\n    from mpitrain.a import x"},
            "mpitrain.a.x",
        ),
        (
            {
                "a/x.py": "if TYPE_CHECKING:\n    from mpitrain.a.y import Y",
                "a/y.py": "from mpitrain.a import x",
            },
            "mpitrain.a.x -> mpitrain.a.y",
        ),
        ({"a/b/x.py": "from . import z", "a/b/z.py": "from .x import f"}, "mpitrain.a.b.x -> mpitrain.a.b.z"),
        (
            {
                "a/b/x.py": "from mpitrain.a.c.y import f",
                "a/c/y.py": "",
                "a/c/z.py": "from mpitrain.a.b.w import f",
                "a/b/w.py": "",
            },
            "a.b -> a.c -> a.b",
        ),
    ],
)
def test_a_circle_is_found(sources: dict[str, str], circle: str) -> None:
    assert any(circle in found for found in find_circles(sources))


@pytest.mark.parametrize(
    "sources",
    [
        {"a/__init__.py": "from mpitrain.a.x import X", "a/x.py": "from mpitrain.a import y", "a/y.py": ""},
        {"a/x.py": "from mpitrain.a.b.y import f", "a/b/y.py": "from mpitrain.a.z import f", "a/z.py": ""},
    ],
)
def test_what_is_no_circle(sources: dict[str, str]) -> None:
    assert find_circles(sources) == []


def test_public_names_are_not_hidden_by_modules() -> None:
    """Whoever imports every module still finds every public name: no folder or module bears the name of one."""
    program = (
        "import importlib, pathlib, sys, mpitrain\n"
        "public = {name: getattr(mpitrain, name) for name in mpitrain.__all__}\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "changed = [name for name, value in public.items() if getattr(mpitrain, name) is not value]\n"
        "assert not changed, changed"
    )
    modules = [
        _module(path) for path in FILES
        if not path.endswith("__main__.py") and not path.startswith("frameworks/")  # which need not be there
    ]  # fmt: skip
    subprocess.run([sys.executable, "-c", program, *modules], check=True, timeout=120)


def test_there_is_something_to_check() -> None:
    assert {"errors.py", "cli/main.py"} <= set(FILES)
