"""What differs between the versions of torch that this package runs on, each with the version beside it, and what of
torch it uses that has no public name: the one file to read when a new torch comes out.

Invariants: no other file asks which torch there is or whether it has a name, or takes a name of torch that begins with
an underscore (`torch._foreach_*`, which torch documents, aside); `tests/test_walls.py` holds this. What may be asked of
torch itself is asked, rather than its version: builds of sites bear numbers of their own. What is private has been the
same from the oldest to the newest version that was tried, where nothing else is said. torch is imported inside
functions only, for `import torch` reads this file.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# What `from mpitrain.torch_versions import ...` gives besides, when it is asked for.
_WITHOUT_PUBLIC_NAME = {
    "AnyDropout": ("torch.nn.modules.dropout", "_DropoutNd"),
    "BatchNorm": ("torch.nn.modules.batchnorm", "_BatchNorm"),
    "NormWithStatistics": ("torch.nn.modules.batchnorm", "_NormBase"),
    "TorchDispatchMode": ("torch.utils._python_dispatch", "TorchDispatchMode"),
    "DisableTorchFunction": ("torch._C", "DisableTorchFunction"),
    "pytree": ("torch.utils", "_pytree"),
    "ErrorType": ("torch._C._distributed_c10d", "ErrorType"),
    "c10d_in_cpp": ("torch._C", "_distributed_c10d"),
    "num_dispatch_modes": ("torch._C", "_len_torch_dispatch_stack"),
    # 1 where several elements of a tensor lie in one place
    "internal_overlap": ("torch", "_debug_has_internal_overlap"),
    # exchanges what two tensors are, for all who hold them
    "swap_tensors": ("torch._C", "_swap_tensor_impl"),
    # in a hook of the backward pass: whether this pass will reach a node of the graph
    "will_be_reached": ("torch._C", "_will_engine_execute_node"),
}

# Those of `tests/matrix.txt`. Before 2.7, torch lets go of the Python half of a Work before its C++ has waited for it:
# DistributedDataParallel then waits for ever, now and then. 2.7 was not tried.
OLDEST_TRIED, NEWEST_TRIED = (2, 8), (2, 15)


def __getattr__(name: str) -> Any:
    if name not in _WITHOUT_PUBLIC_NAME:
        raise AttributeError(f"mpitrain.torch_versions has no {name}")
    module, private = _WITHOUT_PUBLIC_NAME[name]
    return getattr(importlib.import_module(module), private)


def full_version() -> str:
    """Of this torch, "2.14.1+cpu"."""
    import torch

    return str(torch.__version__)


def version(text: str | None = None) -> tuple[int, int]:
    """(2, 14) of "2.14.1+cpu"; by default of this torch."""
    found = re.match(r"(\d+)\.(\d+)", text or full_version())
    return (int(found[1]), int(found[2])) if found else (0, 0)


def untried(text: str | None = None) -> str:
    """A line to say once a launch where this torch is none of those that were tried, nor between them; else ""."""
    text = text or full_version()
    if OLDEST_TRIED <= version(text) <= NEWEST_TRIED:
        return ""
    oldest, newest = (".".join(map(str, one)) for one in (OLDEST_TRIED, NEWEST_TRIED))
    older = version(text) < OLDEST_TRIED
    return (
        f"torch {text} is {'older' if older else 'newer'} than any that mpitrain was tried with ({oldest} to {newest});"
        " going on with it"
    )


# ---- what came, or was renamed, with a version


def dtypes(names: Iterable[str]) -> dict[str, torch.dtype]:
    """Those of torch's types of numbers by these names that this torch has: those of 8 bits and fewer came one by one,
    and sites build without some."""
    import torch

    return {name: found for name in names if isinstance(found := getattr(torch, name, None), torch.dtype)}


def all_gather_single() -> Callable[..., Any]:
    """Whole tensors gathered into one. From 2.13 on it has this name, and the one before warns."""
    import torch.distributed as dist

    found: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return found


def without_sync_of_buffers() -> dict[str, bool]:
    """What has DistributedDataParallel leave buffers alone. From 2.13 on it has another name."""
    import torch

    known = inspect.signature(torch.nn.parallel.DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}


def without_outputs(schedule: Any) -> dict[str, bool]:
    """What has a step of a pipeline's schedule keep no outputs. From 2.10 on they can be left out."""
    return (
        {"return_outputs": False} if "return_outputs" in inspect.signature(schedule.step).parameters else {}
    )


def make_schedule(kind: Callable[..., Any], stage: Any, num_microbatches: int, **options: Any) -> Any:
    """A schedule of a pipeline. Fewer microbatches than there are stages GPipe's takes in 2.13, and refuses in 2.8:
    there it has to be told another number, which it only notes."""
    greet = getattr(stage, "_get_init_p2p_neighbors_ops", list)  # 2.8 has another way
    if len({one.tensor.dtype for one in greet()}) > 1:
        stage._get_init_p2p_neighbors_ops = list  # see WARM_UP_FAULT; MPI is connected without
    try:
        return kind(stage, num_microbatches, **options)
    except ValueError:
        if num_microbatches >= stage.num_stages:
            raise
    made = kind(stage, stage.num_stages, **options)
    made._n_microbatches = num_microbatches
    return made


# The first step of a schedule begins with a number of each stage to its neighbours, for NCCL's sake. In 2.9 (2.8 and
# 2.13 do not) it is sent in 8 bytes to where 4 are expected.
WARM_UP_FAULT = (
    "; if this is the first step of torch's pipeline schedule: torch 2.9's has this fault, and fails over gloo, too;"
    " take another torch, or mpitrain's pipeline(), which goes round it"
)


def warm_up_fault() -> str:
    """What to say besides where one number is sent and another type is received."""
    return WARM_UP_FAULT if version() == (2, 9) else ""


def step_alone(optimizer: torch.optim.Optimizer) -> Callable[[], object] | None:
    """The step of one of torch's own optimizers without what torch puts around it: hooks, a span for profilers, and two
    breaks of a graph that nobody compiles, which cost more than the step of a small tensor. The caller records no
    gradient, and sets `_opt_called`, which torch's schedulers look at. None where it is not known what lies around the
    step."""
    step: Any = type(optimizer).step
    layers = [step]
    while (inner := getattr(layers[-1], "__wrapped__", None)) is not None:
        layers.append(inner)
    # where a function was written, which one that wraps another does not take over from that
    written = [getattr(layer, "__globals__", {}).get("__name__", "") for layer in layers]
    is_torchs = all(name.startswith("torch.optim.") for name in written)
    of_instance = vars(optimizer).get("step")
    counted = getattr(of_instance, "_wrapped_by_lr_sched", False)  # by a scheduler, which does no more
    is_replaced = of_instance is not None and not (
        counted and getattr(of_instance, "__wrapped__", None) is step
    )
    if not is_torchs or is_replaced or optimizer.defaults.get("differentiable"):
        return None
    return functools.partial(layers[-1], optimizer)


def is_muon(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this is torch's Muon, which came with 2.9."""
    import torch

    muon = getattr(torch.optim, "Muon", None)
    return muon is not None and isinstance(optimizer, muon)


def muon_iteration() -> Callable[..., Any] | None:
    """What orthogonalises a matrix for Muon; None where this torch does not have it where it is looked for."""
    import torch

    found: Callable[..., Any] | None = getattr(getattr(torch.optim, "_muon", None), _MUON_ITERATION, None)
    return found


def set_muon_iteration(iteration: Callable[..., Any]) -> None:
    """Put another function in its place: Muon has no public way to be given one."""
    import torch

    setattr(torch.optim._muon, _MUON_ITERATION, iteration)


_MUON_ITERATION = "_zeropower_via_newtonschulz"

# ---- torch.distributed


def c10d() -> Any:
    """The module that holds torch's groups; what is private in it is used in this file alone."""
    return importlib.import_module("torch.distributed.distributed_c10d")


def accelerator_kind() -> str | None:
    """Of the accelerator that this torch is built for or has been given since; `torch.accelerator`, which says so, is
    yet to come while torch is imported."""
    import torch

    found = torch._C._accelerator_getAccelerator()
    return None if found is None else str(found.type)


def knows_python_backends() -> bool:
    """Whether a backend may be written in Python, as it may from 2.14 on, where torch's C++ asks of one what a group in
    Python leaves out."""
    import torch.distributed as dist

    return hasattr(dist.ProcessGroup, "supports_reconfigure")


def record_only_if_asked(backend: str) -> None:
    """Have torch's flight recorder look at groups of a backend only where one of its variables gives it a size. From
    2.15 on it looks at every group that is made, which for ours makes small collectives a fifth slower."""
    import torch.distributed.distributed_c10d as c10d

    asked = any(os.environ.get(name) for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"))
    if not asked and hasattr(c10d, "_FR_SELF_RECORDING_BACKENDS"):
        c10d._FR_SELF_RECORDING_BACKENDS.add(backend)


def asks_for_reconfigure(options: Any) -> bool:
    """Whether the group that is to be made with these options is one that survivors make anew, as may be from 2.14
    on."""
    return bool(getattr(options, "enable_reconfigure", False))


def replace_group_maker(wrap: Callable[[Any], Any]) -> None:
    """Have every process group of this process made by `wrap(torch's own function)`. Tried without, on 2.8 and 2.13:
    `Backend.register_backend("gloo", ours)` is accepted, and torch makes its own gloo all the same; of a name
    for each device, in either order, a group in Python is left alone with no backend for the other device. A Backend in
    Python, which 2.14 takes there, says of no asynchronous Work that it is completed, and raises for `recv(src=None)`
    (tried on 2.14.0)."""
    c10d()._new_process_group_helper = wrap(c10d()._new_process_group_helper)


def name_and_store(group: Any) -> tuple[str, Any]:
    """The backend as it was asked for, and the store, of one of torch's groups."""
    return c10d()._world.pg_map[group]  # type: ignore[no-any-return]


def set_store(group: Any, store: Any) -> None:
    """Give a group another store."""
    groups = c10d()._world.pg_map
    groups[group] = groups[group][0], store


def set_name(group: Any, backend: str) -> None:
    """Have a group answer to this name of a backend, if this rank is in it."""
    module = c10d()
    world, name = module._world, module.Backend(backend)
    if group in world.pg_map:
        world.pg_map[group] = name, world.pg_map[group][1]
        world.pg_backend_config[group] = str(module.BackendConfig(name))


def renumber_group(group: Any, size: int) -> None:
    """A default group has this size now: torch, which lets its backends be made anew from 2.14 on, does not ask."""
    c10d()._world.pg_group_ranks[group] = {rank: rank for rank in range(size)}


def innermost_store(store: Any) -> Any:
    """What a store with prefixes asks."""
    return getattr(store, "_underlying_non_prefix_store", store)


def forget_group(group: Any) -> None:
    """Take a group off torch's lists: it is a part of another one, which ends it."""
    module = c10d()
    world = module._world
    for table in (world.pg_map, world.pg_names, world.pg_backend_config):
        del table[group]
    for tag in {"", world.pg_to_tag.pop(group)}:
        with contextlib.suppress(KeyError, ValueError):
            world.tags_to_pg[tag].remove(group)
    module._unregister_process_group(group.group_name)


def ddp_buckets(parameters: list[Any], limits: list[int], sparse: list[bool]) -> list[list[int]]:
    """Which gradients DistributedDataParallel reduces together."""
    import torch.distributed as dist

    found: Any = dist._compute_bucket_assignment_by_size(parameters, limits, sparse)
    return [list(bucket) for bucket in found[0]]


# ---- the profiler


def profiler() -> tuple[Callable[[], bool], Callable[..., Any], Callable[[Any], None]]:
    """Whether somebody profiles; begins a span with a name and tensors, and ends it, in whatever thread.

    From 2.13 on (2.8 and 2.9 do not; between them not tried) a profile has spans that end in another thread. Before, it
    loses them, and what ends with a future after the profile has ended crashes: there a span ends where it began, and
    shows that something was called, and with what.
    """
    import torch

    spans: Any = torch._C._autograd
    begin, end = spans._record_function_with_args_enter, spans._record_function_with_args_exit

    def begin_and_end(name: str, *tensors: torch.Tensor) -> None:
        end(begin(name, *tensors))

    asks = torch.autograd._profiler_enabled
    return (asks, begin, end) if spans_end_elsewhere() else (asks, begin_and_end, end)


def spans_end_elsewhere() -> bool:
    """Whether a profile has spans that end in another thread than the one that has begun them."""
    return version() >= (2, 13)


# ---- tensors


def typed_storage() -> Any:
    """The method of tensors that hands out their storage without a warning."""
    import torch

    return torch.Tensor._typed_storage


def schema_of(operation: Any) -> Any:
    """The names and types of an operation's arguments and results."""
    return operation._schema


# ---- modules and optimizers, for what is alike in several of them


def global_step_hooks() -> tuple[dict[int, Any], dict[int, Any]]:
    """Before and after the step of every optimizer, by number."""
    module = importlib.import_module("torch.optim.optimizer")
    return module._global_optimizer_pre_hooks, module._global_optimizer_post_hooks


# ---- torchao, which asks for names of torch and says in its metadata nothing of it

_TORCHAO = {(2, 11): "0.17.0"}  # before which torch, the newest that goes with it (2.8.0 and 2.9.1 tried)


def torchao_for(text: str | None = None) -> str:
    """The newest torchao that goes with a torch, by default this one; empty where the newest does."""
    return next((found for before, found in sorted(_TORCHAO.items()) if version(text) < before), "")


# ---- the compiler


def has_compiler() -> bool:
    """Whether this process has imported torch's compiler."""
    return _COMPILER in sys.modules


def behind_mark(function: Callable[..., Any]) -> Any:
    """What is called where the compiler is not asked; None for a function without torch's mark."""
    return getattr(function, "__wrapped__", None)


def import_compiler() -> None:
    """Import it: its modules import one another in circles, which several threads at once would enter from several
    sides."""
    importlib.import_module(_COMPILER)


_COMPILER = "torch._dynamo"
# What a function that is marked as not to be compiled calls once that is known, which imports the compiler.
UNCOMPILED = "__dynamo_disable"

# ---- processes that load data


def be_loader_worker(options: Mapping[str, Any]) -> None:
    """From here on `torch.utils.data.get_worker_info()` says so, with these attributes."""
    worker: Any = importlib.import_module("torch.utils.data._utils.worker")
    worker._worker_info = worker.WorkerInfo(**options)
