"""The backend that torch 2.14 and later finds inside a group of ours, for callers in C++, and torch's own road to it.

Invariants: the group carries everything, whichever road a call takes. As a rule a call goes straight to the group's own
method: a Backend in Python costs a fifth more for a small collective, and its Works know neither `is_completed()` nor
errors. Where somebody looks at collectives (a dispatch mode such as CommDebugMode, a hook such as torch's flight
recorder), a call takes torch's road instead: through the dispatcher, which informs them, to this backend, and from
there to the group's method; its caller gets the group's own Work all the same.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from mpitrain.torch_backend import BACKEND
from mpitrain.torch_versions import c10d_in_cpp as c10d
from mpitrain.torch_versions import knows_python_backends, num_dispatch_modes, record_only_if_asked

IS_KNOWN = knows_python_backends()
_CUSTOM = dist.ProcessGroup.BackendType.CUSTOM
_road = threading.local()  # `is_inside`: torch's road has come to a group; `work`: what that has begun

# What C++ calls a collective, and the group's older names for it.
_OPERATIONS: dict[str, tuple[str, ...]] = {
    "broadcast": (), "allreduce": (), "allreduce_coalesced": (), "reduce": (), "allgather": (),
    "allgather_coalesced": (), "all_gather_single": ("_allgather_base",),
    "all_gather_single_coalesced": ("allgather_into_tensor_coalesced",), "gather": (), "scatter": (),
    "reduce_scatter": (), "reduce_scatter_single": ("_reduce_scatter_base",),
    "reduce_scatter_single_coalesced": ("reduce_scatter_tensor_coalesced",), "alltoall": (),
    "all_to_all_single": ("alltoall_base",), "send": (), "recv": (), "recv_anysource": (), "barrier": (),
}  # fmt: skip


# What C++ asks of a backend besides, and what the group calls it.
_ASKED = {
    "abort": "abort", "shutdown": "shutdown", "set_timeout": "set_timeout", "get_error": "get_error",
    "_get_sequence_number_for_group": "_get_sequence_number_for_group", "new_window": "new_window",
    "get_reconfigure_handle": "get_reconfigure_handle", "reconfigure": "reconfigure",
    "registerAbortHook": "register_abort_hook", "unregisterAbortHook": "unregister_abort_hook",
}  # fmt: skip


class _Inside(c10d.Backend):
    """A group as torch's C++ sees it; what it is asked goes to the group."""

    # torch's own answer to what is left out here calls itself for ever
    supports_splitting = supports_coalescing = supports_time_estimate = False
    supports_shrinking = supports_window = False

    def __init__(self, group: Any):
        super().__init__(group.rank(), group.size())
        self._group = weakref.ref(group)  # the group has this object

    def getBackendName(self) -> str:
        """ "mpi4py"."""
        return BACKEND

    @property
    def supports_reconfigure(self) -> bool:
        """As the group."""
        return bool(self.group.supports_reconfigure)

    @property
    def group(self) -> Any:
        """The group whose backend this is."""
        group = self._group()
        assert group is not None, "C++ holds the backend of a group that is gone"
        return group


def put_into(group: Any) -> _Inside:
    """Make the backend of a group, and tell torch's half of the group of it."""
    inside = _Inside(group)
    for kind in dist.Backend.backend_capability[BACKEND]:
        group._register_backend(torch.device(kind), _CUSTOM, inside)
    group._set_default_backend(_CUSTOM)
    return inside


def let_torch_see(kind: type[Any]) -> None:
    """Have the collectives of this class of groups take torch's road while somebody looks."""
    kind._is_observed = False
    record_only_if_asked(BACKEND)
    for name, others in _OPERATIONS.items():
        own = getattr(kind, name)
        setattr(_Inside, name, _carried(own))
        setattr(kind, name, _seen(name, own))
        for (
            older
        ) in others:  # C++ has them lead to the newer ones, and would take one for another method than `name`
            owner = next(base for base in kind.__mro__ if older in vars(base))
            delattr(owner, older)
    _Inside.allreduce_sparse = _Inside.allreduce
    for name, own_name in _ASKED.items():
        setattr(_Inside, name, _forwarded(own_name))
    for name in ("register_pre_hook", "register_post_hook"):
        setattr(kind, name, _registering(name))
    for hook in (c10d.FlightRecorderHook, c10d.NanCheckHook):
        hook.attach = staticmethod(
            _attaching(hook.attach, kind)
        )  # C++ tells a group of its hooks, not Python


def _seen(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    theirs = getattr(dist.ProcessGroup, name)

    def method(self: Any, *arguments: Any, **named: Any) -> Any:
        if not (num_dispatch_modes() or self._is_observed) or getattr(_road, "is_inside", False):
            return own(self, *arguments, **named)
        _road.work = None
        work = theirs(self, *arguments, **named)
        return work if _road.work is None else _road.work  # none: a mode has answered itself

    # A call out of a method of this name is meant for torch's own method, and comes back here out of any other.
    method.__code__ = method.__code__.replace(co_name=name)
    return functools.wraps(own)(method)


def _carried(own: Callable[..., Any]) -> Callable[..., Any]:
    def carry(self: _Inside, *arguments: Any) -> Any:
        _road.is_inside = True  # what the method calls of the group is no call of its user's
        try:
            work = own(self.group, *arguments)
        finally:
            _road.is_inside = False
        _road.work = work
        return work

    return carry


def _forwarded(name: str) -> Callable[..., Any]:
    def ask(self: _Inside, *arguments: Any) -> Any:
        return getattr(self.group, name)(*arguments)

    return ask


def _registering(name: str) -> Callable[..., Any]:
    theirs = getattr(dist.ProcessGroup, name)

    def register(self: Any, hook_id: int, hook: Callable[..., None]) -> None:
        self._is_observed = True
        theirs(self, hook_id, hook)

    return register


def _attaching(original: Callable[..., Any], kind: type[Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def attach(group: Any, *arguments: Any, **named: Any) -> Any:
        if isinstance(group, kind):
            group._is_observed = True
        return original(group, *arguments, **named)  # torch 2.15 says the ranks of the world, too

    return attach
