"""A process that has imported what every rank imports, and forks one for each client (`client.py`) that asks.

Importing torch takes a rank two to three seconds of a core, and forking one that has imported it some milliseconds; MPI
is not started here, so every program gets ranks of its own: nothing of the one before is left in them.

It stays single-threaded, so that a fork is safe, and waits in `select` while nobody asks. It ends, with all ranks, when
its standard input closes: whoever started it has ended then, also by being killed.

A rank ends as any Python does, but takes down only what it has imported itself, and mpitrain: to take down torch, too,
takes a fork a quarter of a second of a core, most of it to copy the pages that it shares with the server.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import pkgutil
import random
import resource
import runpy
import select
import signal
import socket
import struct
import sys
import types
import weakref
from typing import Any

# What ranks import that does not start MPI; besides, `_preload_package`.
PRELOADED = (
    "h5py",
    "numpy",
    "safetensors.torch",
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
)
# Holds the process groups that a program leaves to its end.
_TAKEN_DOWN = "torch.distributed.distributed_c10d"
_spared: dict[str, types.ModuleType] = {}
_MOST_FILES = 250
# A client may have a host name of its own, as on an emulated node; nothing else of where it lives can be taken over.
_HOST_NAME, _SHARED = "uts", ("net", "mnt", "ipc", "pid", "user")
_CLONE_NEWUTS = 0x04000000


class _Rank:
    """A forked process and the connection of its client."""

    def __init__(self, pid: int, client: socket.socket):
        self.pid, self.client = pid, client
        self.ended = os.pidfd_open(pid)

    def close(self) -> None:
        self.client.close()
        os.close(self.ended)


def serve(listener: socket.socket) -> dict[str, Any] | None:
    """Fork ranks until standard input closes (None), or, in a rank, return what was asked for."""
    ranks: list[_Rank] = []
    while True:
        waiting = {0: None, listener.fileno(): None}
        of_clients = {rank.client.fileno(): rank for rank in ranks}
        of_ends = {rank.ended: rank for rank in ranks}
        ready, _, _ = select.select([*waiting, *of_clients, *of_ends], [], [])
        if 0 in ready:
            for rank in ranks:
                _kill_session(rank.pid)
            return None
        for number in ready:
            if number in of_ends:
                rank = of_ends[number]
                _, status = os.waitpid(rank.pid, 0)
                with contextlib.suppress(OSError):
                    rank.client.sendall(b"%d\n" % status)
                rank.close()
                ranks.remove(rank)
        for number in ready:
            # The client says nothing more: it has been killed, and its rank is killed with it.
            if number in of_clients and of_clients[number] in ranks:
                _signal(of_clients[number].pid)
                _forget_client(of_clients[number])
        if listener.fileno() in ready:
            client, _ = listener.accept()
            files: list[int] = []
            try:
                asker = _asker(client)
                request, files = _read(client)
                pid = os.fork()
            except (
                OSError,
                ValueError,
            ) as error:  # no memory for one more, or a client that was killed as it asked
                print(f"the rank pool cannot fork: {error}", file=sys.stderr, flush=True)
                client.close()
                for number in files:
                    os.close(number)
                continue
            if pid == 0:
                for rank in ranks:
                    rank.close()
                client.close()
                listener.close()
                _become(request, files, asker)
                return request
            ranks.append(_Rank(pid, client))
            with contextlib.suppress(OSError):  # the launch is over
                open(f"{request['folder']}/{pid}", "w").close()
            with contextlib.suppress(OSError):  # the client has been killed meanwhile
                client.sendall(b"%d\n" % pid)
            for number in files:
                os.close(number)


def _forget_client(rank: _Rank) -> None:
    # its end is still waited for; a closed connection would be ready for ever
    rank.client.close()
    rank.client = socket.socket(socket.AF_UNIX)


def _asker(client: socket.socket) -> int:
    """The client's process number; OSError if it lives where no fork of this process can be."""
    pid, _, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if any(_namespace(pid, kind) != _namespace(os.getpid(), kind) for kind in _SHARED):
        raise OSError(f"process {pid} has namespaces of its own")
    return int(pid)


def _namespace(pid: int, kind: str) -> str:
    return os.readlink(f"/proc/{pid}/ns/{kind}")


def _read(client: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """A request and the files that came with it."""
    head, files, _, _ = socket.recv_fds(client, 8, _MOST_FILES)
    left = int.from_bytes(head, "big")
    parts = []
    while left and (part := client.recv(left)):
        parts.append(part)
        left -= len(part)
    return json.loads(b"".join(parts)), list(files)


def _become(request: dict[str, Any], files: list[int], asker: int) -> None:
    """Take over all that the client has from its launcher."""
    _skip_preloaded_destructors()
    os.setsid()
    if _namespace(asker, _HOST_NAME) != _namespace(os.getpid(), _HOST_NAME):
        with open(f"/proc/{asker}/ns/{_HOST_NAME}") as host_name:
            if ctypes.CDLL(None, use_errno=True).setns(host_name.fileno(), _CLONE_NEWUTS):
                raise OSError(ctypes.get_errno(), "no host name of its own")
    # above every wanted number first, so that none is overwritten before it has been moved
    top = max([*files, *request["files"]]) + 1
    moved = []
    for index, number in enumerate(files):
        os.dup2(number, top + index, inheritable=False)
        os.close(number)
        moved.append(top + index)
    for number, wanted in zip(moved, request["files"]):
        os.dup2(number, wanted, inheritable=True)
        os.close(number)
    os.chdir(request["cwd"])
    os.umask(request["umask"])
    os.sched_setaffinity(0, request["cores"])
    os.environ.clear()
    os.environ.update(request["environ"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    for kind, *limits in request["limits"]:
        if limits != list(resource.getrlimit(kind)):
            resource.setrlimit(kind, (limits[0], limits[1]))
    signal.pthread_sigmask(signal.SIG_SETMASK, request["mask"])
    random.seed()
    sys.modules["numpy"].random.seed()
    if "COVERAGE_PROCESS_START" in os.environ:  # a started process would do so by itself
        import coverage

        coverage.process_startup(force=True)


def run(argv: list[str]) -> None:
    """What `python ARGV` does: a file, `-m module` or `-c text`, with its arguments; `-P` may come first."""
    path = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    is_safe = argv[0] == "-P" or bool(os.environ.get("PYTHONSAFEPATH"))
    kind, *rest = argv[1:] if argv[0] == "-P" else argv
    if kind == "-m":
        sys.path[:0] = path if is_safe else [os.getcwd(), *path]
        sys.argv = rest
        _hand_over_package()
        _load_backends()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    main = types.ModuleType("__main__")
    if kind == "-c":
        sys.path[:0] = path if is_safe else ["", *path]
        sys.argv = ["-c", *rest[1:]]
        code = compile(rest[0], "<string>", "exec")
    else:
        sys.path[:0] = path if is_safe else [os.path.dirname(os.path.abspath(kind)), *path]
        sys.argv = [kind, *rest]
        main.__file__ = kind
        with open(kind, "rb") as source:
            code = compile(source.read(), kind, "exec", dont_inherit=True)
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    _hand_over_package()
    _load_backends()
    exec(code, main.__dict__)


class _PackageFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Runs `mpitrain/__init__.py` when a rank first imports the package, in the module that has its parts already:
    what it does depends on the rank's environment."""

    def __init__(self, package: types.ModuleType):
        self.package = package

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        return importlib.util.spec_from_loader(fullname, self) if fullname == "mpitrain" else None

    def create_module(self, spec: Any) -> types.ModuleType:
        return self.package

    def exec_module(self, module: types.ModuleType) -> None:
        sys.meta_path.remove(self)
        spec = _package_spec()
        module.__spec__, module.__loader__ = spec, spec.loader
        spec.loader.exec_module(module)


def _package_spec() -> Any:
    return importlib.machinery.PathFinder.find_spec("mpitrain")


def _preload_package() -> None:
    """Import the parts of mpitrain that do not need MPI, and leave torch as if none had been."""
    no_module: Any = None
    sys.modules["mpi4py.MPI"] = no_module  # whatever wants it fails, and is not kept
    backend = types.ModuleType("mpitrain.torch_backend")
    backend.register_backend_lazily = lambda: None  # type: ignore[attr-defined]
    sys.modules[backend.__name__] = backend
    package = importlib.import_module("mpitrain")
    for part in pkgutil.walk_packages(package.__path__, "mpitrain.", onerror=lambda name: None):
        if not part.name.endswith("__main__"):
            with contextlib.suppress(ImportError, ValueError):  # the latter says that there is no MPI
                importlib.import_module(part.name)
    # of all sources, by git and from metadata: the first run of each launch would look, and find the same
    facts = sys.modules["mpitrain.reporting.environment"]
    facts.code_versions()
    facts._revision_of_package()
    for name in ("mpi4py.MPI", "mpitrain", backend.__name__):
        del sys.modules[name]
    vars(package).pop("torch_backend", None)
    sys.meta_path.insert(0, _PackageFinder(package))


def _hand_over_package() -> None:
    """Keep what `_preload_package` has imported if it is the package that this rank would find."""
    finder = next((finder for finder in sys.meta_path if isinstance(finder, _PackageFinder)), None)
    if finder is None:
        return
    found = _package_spec()
    if found is None or found.origin != finder.package.__file__:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.startswith("mpitrain.")]:
            del sys.modules[name]


def _load_backends() -> None:
    """What `import torch` does last in a process that starts, in the environment and with the path of this rank."""
    torch = sys.modules["torch"]
    if torch._is_device_backend_autoload_enabled():
        torch._import_device_backends()


def _spare_preloaded(at_start: set[str]) -> None:
    """Have a rank's end leave alone the modules that are there by now, besides those of `at_start`."""
    for name, module in sys.modules.items():
        if name not in at_start and name.partition(".")[0] != "mpitrain" and name != _TAKEN_DOWN:
            _spared[name] = module
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_spared))  # or Python's end would release them
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False


def _forget_spared() -> None:
    for name, module in _spared.items():
        if sys.modules.get(name) is module:
            del sys.modules[name]


def _skip_preloaded_destructors() -> None:
    """The C library runs what was registered last first, so what the rank registers from here on is still run."""
    library = ctypes.CDLL(None)
    library.on_exit(library._exit, None)
    library.__cxa_atexit(library.fflush, None, None)


def _kill_session(session: int) -> None:
    """The rank, which leads a session, and whatever it has started."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                with open(f"/proc/{entry}/stat") as stat:
                    its_session = int(stat.read().rsplit(")", 1)[1].split()[3])
                if its_session == session:
                    _signal(int(entry))


def _signal(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _prepare(address: str, has_package: bool) -> socket.socket:
    faulthandler.enable()
    at_start = set(sys.modules)
    atexit.register(_forget_spared)  # before all others, so it is called after them
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # of which mpitrain is one
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    if has_package:
        _preload_package()
    assert "mpi4py.MPI" not in sys.modules, "importing it starts MPI, which a rank does for itself"
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, (
        f"{len(threads)} threads: a fork keeps only one, and what the others hold stays held"
    )
    _spare_preloaded(at_start)
    gc.collect()
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(128)
    return listener


if __name__ == "__main__":
    _listener = _prepare(sys.argv[1], has_package=sys.argv[2] == "with-package")
    os.write(1, b"ready\n")
    _request = serve(_listener)
    if _request is not None:
        del _listener
        run(_request["argv"])
