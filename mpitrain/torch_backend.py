"""Makes torch.distributed know the backend "mpi4py", without importing MPI to do so.

torch calls `register_backend_lazily` by itself at the end of `import torch` (the entry point `torch.backends` in
`setup.cfg`), so a script need not import this package; `import mpitrain` calls it too. What it does to torch:

    backend "mpi4py"            is registered; mpi4py is imported when a process group is made
    init_process_group          "mpi4py" without store and init_method means the ranks that MPI started: torch would ask
                                the environment for MASTER_ADDR and ports; so does "env://", unless MASTER_ADDR and
                                RANK are set
    init_method="mpi://"        MPI brings the ranks of any backend together: rank 0 binds a free port and tells all
    new_group                   of another backend beside ours gets a store that all ranks see
    "cpu:mpi4py,cuda:nccl"      each device has its backend; torch would let ours have them all
    monitored_barrier           takes our groups too, where torch asks for gloo
    MPITRAIN_REPLACES=gloo      in the environment: a script's "gloo" means "mpi4py", and who asks for a group's backend
                                is told "gloo", for programs that compare the name with those that they know

And to rank 0 of a launched script: `sys.exit` notes whether it is a failure, which nobody could ask for at the end.

Invariants: this file, and the one that it imports, take only the standard library at first, because `import torch`,
`import mpitrain` and `mpitrain --help` run them. If torch.distributed is loaded already, the backend is registered at
once; otherwise a finder on sys.meta_path waits for its import and registers then. An error in here never makes `import
torch` fail. Every call that does not concern MPI passes through unchanged.
"""

import atexit
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NoReturn

from mpitrain import torch_versions

BACKEND = "mpi4py"
SCHEME = "mpi"
REPLACES = "MPITRAIN_REPLACES"
SCRIPT_OF = "MPITRAIN_SCRIPT_OF"  # in a script that `mpitrain launch` has started: of how many ranks
_TARGET = "torch.distributed"
_GROUP = "mpitrain.mpi.process_group.process_group"
_has_made_group, _has_failed, _script_of = False, False, 1
_LAUNCHED = "mpitrain.system.launched.launch_variables"
_MADE_ANEW = "mpitrain.mpi.process_group.reconfigurable"
_MIXED_GROUP = "mpitrain.mpi.process_group.mixed_group"


def register_backend_lazily() -> None:
    """Register now if torch.distributed is there, else as soon as it is imported. Safe to call twice."""
    try:
        _name_ranks()
        module = sys.modules.get(_TARGET)
        if module is not None and hasattr(module, "Backend"):
            register()
        elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder())
    except Exception as error:
        warnings.warn(
            f'mpitrain could not register its torch.distributed backend "{BACKEND}": {error!r}', stacklevel=2
        )


def _name_ranks() -> None:
    """Set torchrun's variables where an unchanged script is to use our group, and have a rank of a launched script that
    makes none be told so at its end."""
    global _script_of
    if REPLACES in os.environ:
        for name, value in importlib.import_module(_LAUNCHED).torchrun_names().items():
            os.environ.setdefault(name, value)
    # taken out, for a process that this one starts is no rank
    _script_of = int(os.environ.pop(SCRIPT_OF, _script_of))
    if _script_of > 1 and os.environ.get("RANK") == "0":
        atexit.unregister(_doubt)  # of `import mpitrain` and `import torch` one is the second
        atexit.register(_doubt)
        if not hasattr(sys.exit, "__wrapped__"):
            sys.exit = _noting_failure(sys.exit)


def _noting_failure(leave: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
    """`sys.exit`, after which nobody knows with what code a process ends."""

    @functools.wraps(leave)
    def noting(code: object = None) -> NoReturn:
        global _has_failed
        _has_failed = code not in (None, 0)
        leave(code)

    return noting


def _doubt() -> None:
    if _has_failed or getattr(sys, "last_value", None) is not None:  # it says why it has ended
        return
    if not _has_made_group and "mpi4py.MPI" not in sys.modules:
        print(
            f"mpitrain: warning: of the {_script_of} processes of this launch, rank 0 has made no process group: has "
            "each of them trained alone, on all data? Call torch.distributed.init_process_group"
            f'("{BACKEND}"), or mpitrain.wrap',
            file=sys.stderr,
        )


def register() -> None:
    """Register the backend with torch.distributed (imports it). Safe to call twice."""
    import torch.distributed as dist

    if not dist.is_available() or BACKEND in dist.Backend.backend_list:
        return
    dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=_devices())
    dist.register_rendezvous_handler(SCHEME, _rendezvous)
    for name, wrap in (
        ("init_process_group", _ask_mpi),
        ("new_group", _with_a_store),
        ("monitored_barrier", _with_ours),
    ):
        wrapped = wrap(getattr(dist, name))
        setattr(dist, name, wrapped)
        setattr(torch_versions.c10d(), name, wrapped)
    torch_versions.replace_group_maker(lambda torchs: _replace(_mix(torchs)))


def _devices() -> list[str]:
    """Types of devices whose tensors are ours: the host's, and those of the accelerator that this torch is built for or
    has been given since."""
    found = torch_versions.accelerator_kind()
    return ["cpu"] if found is None else ["cpu", found]


def _group() -> Any:
    """The module of the process group, which imports MPI."""
    return importlib.import_module(_GROUP)


def _create(options: object, backend_options: object) -> Any:
    makes_anew = torch_versions.asks_for_reconfigure(options)
    return (importlib.import_module(_MADE_ANEW) if makes_anew else _group()).create(options, backend_options)


def _rendezvous(url: str, *_: object, **__: object) -> Any:
    """torch's handler for init_method="mpi://": a generator of (store, rank, number of ranks)."""
    return _group().rendezvous_by_mpi()


def _ask_mpi(original: Any) -> Any:
    @functools.wraps(original)
    def init_process_group(
        backend: str | None = None, init_method: str | None = None, *args: Any, **kwargs: Any
    ) -> None:
        global _has_made_group
        _has_made_group = True
        importlib.import_module(_TARGET).Backend.backend_capability[BACKEND] = _devices()
        asked, backend = backend, _replaced(backend)
        ours = _is_ours(backend)
        elsewhere = {"MASTER_ADDR", "RANK"} <= os.environ.keys()  # where env:// meets
        by_us = init_method is None or (init_method == "env://" and not elsewhere)
        names_ranks = len(args) > 1 or kwargs.get("store") is not None  # the first is the timeout
        if ours and by_us and not names_ranks and _group().meets_elsewhere(_world_size(kwargs)):
            init_method, by_us = "env://", False
        if by_us and not names_ranks and _is_mixed(backend):
            init_method = f"{SCHEME}://"
        if ours and by_us and not names_ranks:
            original(BACKEND, None, *args, **{**kwargs, **_group().rendezvous()})
        else:
            original(BACKEND if ours else backend, init_method, *args, **kwargs)
        if asked != backend:
            _tell(None, asked)

    return init_process_group


def _world_size(options: Any) -> int:
    """What the caller or, where it leaves that out, the environment says; 0 where neither does."""
    asked = options.get("world_size", -1)
    told = os.environ.get("WORLD_SIZE", "")
    return int(asked if asked > 0 else told if told.isdigit() and "MASTER_ADDR" in os.environ else 0)


def _with_a_store(original: Any) -> Any:
    @functools.wraps(original)
    def new_group(
        ranks: Any = None, timeout: Any = None, backend: str | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        meant = _replaced(backend)
        all_call = not kwargs.get("use_local_synchronization")
        if meant is not None and not _is_ours(meant) and _GROUP in sys.modules and all_call:
            _group().share_store()
        return original(ranks, timeout, backend, *args, **kwargs)

    return new_group


def _replace(original: Any) -> Any:
    """Also of groups that are made like the default one, whose name is what was asked for."""

    @functools.wraps(original)
    def new_process_group_helper(
        size: int, rank: int, ranks: Any, backend: Any, *args: Any, **kwargs: Any
    ) -> Any:
        meant = _replaced(backend)
        made = original(size, rank, ranks, meant, *args, **kwargs)
        if meant != backend:
            _tell(made[0], backend)
        return made

    return new_process_group_helper


def _tell(group: Any, asked: object) -> None:
    """Have a group (the default one: None) answer to the backend that was asked for."""
    import torch.distributed as dist

    torch_versions.set_name(group or dist.group.WORLD, str(asked))


def _replaced(backend: str | None) -> str | None:
    """Ours in place of every backend whose name the environment has, on each type of device."""
    asked = {name.strip() for name in os.environ.get(REPLACES, "").lower().split(",")} - {""}
    if backend is None or not asked & _names(backend):
        return backend
    named = {device: BACKEND if name in asked else name for device, name in devices_of(backend).items()}
    if set(named.values()) == {BACKEND}:
        return BACKEND
    return ",".join(f"{device}:{name}" for device, name in named.items())


def _is_ours(backend: str | None) -> bool:
    """Whether a backend is ours on every device: "mpi4py", "cpu:mpi4py", "cpu:mpi4py,cuda:mpi4py"."""
    return backend is not None and _names(backend) == {BACKEND}


def _is_mixed(backend: str | None) -> bool:
    """Whether a backend is ours on some devices and another's on others: "cpu:mpi4py,cuda:nccl"."""
    return backend is not None and {BACKEND} < _names(backend)


def _names(backend: str) -> set[str]:
    return set(devices_of(backend).values())


def devices_of(backend: str) -> dict[str, str]:
    """Which backend has which type of device; that of a backend without devices is ""."""
    pairs = (part.rpartition(":") for part in str(backend).lower().split(","))
    return {device.strip(): name.strip() for device, _, name in pairs}


def _mix(original: Any) -> Any:
    @functools.wraps(original)
    def new_process_group_helper(
        size: int, rank: int, ranks: Any, backend: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not _is_mixed(backend):
            return original(size, rank, ranks, backend, *args, **kwargs)
        mixed = importlib.import_module(_MIXED_GROUP)
        return mixed.make(original, size, rank, ranks, backend, *args, **kwargs)

    return new_process_group_helper


def _with_ours(original: Any) -> Any:
    @functools.wraps(original)
    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        import torch.distributed as dist

        ours: Any = group or (dist.group.WORLD if dist.is_initialized() else None)
        if _GROUP in sys.modules and isinstance(ours, _group().MpiProcessGroup):
            ours.monitored_barrier(timeout, wait_all_ranks)
        else:
            original(group, timeout, wait_all_ranks)

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
                register_backend_lazily()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
