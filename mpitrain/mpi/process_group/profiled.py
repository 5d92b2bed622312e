"""What torch.profiler shows of the process group: "mpi4py:all_reduce" from the call to its end, with the shapes of its
inputs, and "mpi4py:wait".

Invariants: where nobody profiles, no span is made. A span of a collective is what torch calls asynchronous: it ends in
another thread than the one that has begun it, and before whoever waits for the Work goes on, so that a profile which
ends then has it. That thread does nothing else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from mpitrain import torch_versions
from mpitrain.torch_backend import BACKEND

_NO_SPAN = contextlib.nullcontext()
_NAMES = {  # torch's for them
    "allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all", "receive": "recv",
    "receive from any rank": "recvAnySource", "all_to_all_single": "all_to_all",
    "all_gather_single": "all_gather", "reduce_scatter_single": "reduce_scatter",
}  # fmt: skip
_ending = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mpitrain-profile")
is_on, _begin, _end = torch_versions.profiler()


def waiting() -> contextlib.AbstractContextManager[Any]:
    """A span while a thread waits for a Work."""
    if not is_on():
        return _NO_SPAN
    return torch.autograd.profiler.record_function(f"{BACKEND}:wait")


def begin(name: str, inputs: Any) -> Any:
    """Begin the span of a collective or a message whose inputs are a tensor, or lists of them; None where nobody
    profiles."""
    if not is_on():
        return None
    return _begin(f"{BACKEND}:{_NAMES.get(name, name)}", *_tensors(inputs))


def end(span: object) -> None:
    """End what `begin` has returned."""
    if span is None:
        return
    try:
        _ending.submit(_end, span).result()
    except RuntimeError:  # the interpreter is shutting down
        _end(span)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    else:
        for value in values:
            yield from _tensors(value)
