"""Makes torch.distributed know the backend "mpi4py", without importing torch or MPI to do so.

Invariants: it imports only the standard library at first, because `import mpitrain` (and so `mpitrain --help`) runs it.
If torch.distributed is loaded already, the backend is registered at once; otherwise a finder on
sys.meta_path waits for its import and registers then. mpi4py is imported when a process group is made.

A script that calls `torch.distributed.init_process_group("mpi4py")` without further arguments means the ranks that
MPI started. torch would ask the environment for MASTER_ADDR and ports, and lets only its own "mpi" backend
do without, so `init_process_group` is wrapped: for this backend, where neither store nor init_method is
given, rank and world size come from MPI and no port is opened. Every other call passes through unchanged.
"""

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from mpitrain.mpi.process_group.backend import BACKEND

_TARGET = "torch.distributed"


def register_backend_lazily() -> None:
    """Register now if torch.distributed is there, else as soon as it is imported. Safe to call twice."""
    module = sys.modules.get(_TARGET)
    if module is not None and hasattr(module, "Backend"):
        register()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def register() -> None:
    """Register the backend with torch.distributed (imports it). Safe to call twice."""
    import torch.distributed as dist

    if not dist.is_available() or BACKEND in dist.Backend.backend_list:
        return
    dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
    wrapped = _ask_mpi(dist.init_process_group)
    dist.init_process_group = dist.distributed_c10d.init_process_group = wrapped
    monitored = _with_ours(dist.monitored_barrier)
    dist.monitored_barrier = dist.distributed_c10d.monitored_barrier = monitored


def _create(options: Any, backend_options: Any) -> Any:
    from mpitrain.mpi.process_group.process_group import create

    return create(options, backend_options)


def _ask_mpi(original: Any) -> Any:
    @functools.wraps(original)
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        is_explicit = args or any(kwargs.get(name) is not None for name in ("init_method", "store"))
        if not _is_ours(backend) or is_explicit:
            original(backend, *args, **kwargs)
            return
        from mpitrain.mpi.process_group.process_group import rendezvous

        original(BACKEND, **{**kwargs, **rendezvous()})

    return init_process_group


def _is_ours(backend: str | None) -> bool:
    """Whether a backend is ours on every device: "mpi4py", "cpu:mpi4py", "cpu:mpi4py,cuda:mpi4py"."""
    return all(part.rpartition(":")[2] == BACKEND for part in str(backend).lower().split(","))


def _with_ours(original: Any) -> Any:
    """torch's monitored_barrier, which asks for gloo, takes our groups too."""

    @functools.wraps(original)
    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        import torch.distributed as dist

        if not dist.is_initialized() or dist.get_backend(group) != BACKEND:
            original(group, timeout, wait_all_ranks)
            return
        ours: Any = group or dist.group.WORLD
        ours.monitored_barrier(timeout, wait_all_ranks)

    return monitored_barrier


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing itself: it lets the others find torch.distributed and registers after the module has run."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Wrap the loader of torch.distributed, once; None for every other module."""
        if name != _TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                register()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
