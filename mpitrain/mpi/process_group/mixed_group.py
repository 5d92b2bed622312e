"""A process group of several backends, "cpu:mpi4py,cuda:nccl": tensors on some devices travel over MPI, those on others
over another backend of torch.

Invariants: torch makes a Python group's class the whole group and drops the backends of the other devices. So torch is
asked for two groups under one name, ours and one of the other backends, and ours hands over every call whose tensors
lie on a device of theirs. A call without a tensor (a barrier that names no device) is ours.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from mpitrain.mpi.operation import Op
from mpitrain.mpi.process_group.process_group import MpiProcessGroup, creating
from mpitrain.torch_backend import BACKEND, devices_of
from mpitrain.torch_versions import forget_group, set_name

_BY_DEVICE = (
    "broadcast", "allreduce", "allreduce_coalesced", "reduce", "allgather", "allgather_coalesced",
    "allgather_into_tensor_coalesced", "all_gather_single", "all_gather_single_coalesced", "_allgather_base", "gather",
    "scatter", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced", "_reduce_scatter_base", "alltoall", "alltoall_base", "all_to_all_single",
    "send", "recv", "recv_anysource", "barrier", "_start_coalescing", "_end_coalescing",
)  # fmt: skip


class MixedGroup(MpiProcessGroup):
    """Ours on some types of device, `others` (torch's own group of the other backends) on the rest; `use` names them
    both once the group is made."""

    _others: Any = None
    _our_types: frozenset[str] = frozenset()

    def use(self, others: dist.ProcessGroup, our_types: frozenset[str]) -> None:
        """Hand over to `others` what lies on a device of another type than these."""
        self._others, self._our_types = others, our_types

    @property
    def _device_types(self) -> list[torch.device]:
        theirs = [] if self._others is None else list(self._others._device_types)  # 2.15 asks before `use`
        return [torch.device(kind) for kind in sorted(self._our_types)] + theirs

    def _get_backend(self, device: torch.device) -> Any:
        return self if torch.device(device).type in self._our_types else self._others._get_backend(device)

    def set_timeout(self, timeout: Any) -> None:
        """The timeout of every operation from now on, of all backends."""
        super().set_timeout(timeout)
        self._others.set_timeout(timeout)

    def leave(self) -> Op | None:
        """Leave the group, in all backends; the Op is ours."""
        if not self._has_left:
            self._others.shutdown()
        return super().leave()

    def abort(self) -> None:
        """Leave in all backends, without waiting for any rank."""
        if not self._has_left:
            self._others.abort()
        super().leave()


def _by_device(name: str) -> Callable[..., Any]:
    """A method of the group that asks the backend of the device on which its tensors lie."""
    own = getattr(MpiProcessGroup, name)

    @functools.wraps(own)
    def method(self: MixedGroup, *arguments: object, **named: object) -> Any:
        device = _device_in((arguments, *named.values()))
        if device is None or device.type in self._our_types:
            return own(self, *arguments, **named)
        return getattr(self._others, name)(*arguments, **named)

    return method


for _name in _BY_DEVICE:
    setattr(MixedGroup, _name, _by_device(_name))


def _device_in(values: Any) -> torch.device | None:
    """The device of the first tensor in lists of any depth, or that of a barrier's options."""
    for value in values:
        if isinstance(value, torch.Tensor):
            return value.device
        if isinstance(value, torch.device):
            return value
        if isinstance(value, dist.BarrierOptions):
            return value.device
        if isinstance(value, list | tuple) and (found := _device_in(value)) is not None:
            return found
    return None


def make(
    helper: Callable[..., Any], size: int, rank: int, ranks: list[int], backend: str, store: Any, name: str,
    **options: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """What torch's `_new_process_group_helper` returns, for a backend that is ours on some devices only: the group, or
    a mark that this rank is no member, and its store."""
    asked = devices_of(backend)
    theirs = ",".join(f"{kind}:{each}" for kind, each in asked.items() if each != BACKEND)
    others, _ = helper(size, rank, ranks, dist.Backend(theirs), store, f"{name}/others", **options)
    if others is dist.GroupMember.NON_GROUP_MEMBER:
        return others, None
    forget_group(others)
    our_types = frozenset(kind for kind, each in asked.items() if each == BACKEND)
    with creating(MixedGroup):
        options.pop("device_id", None)
        group, prefixed = helper(size, rank, ranks, dist.Backend(BACKEND), store, name, **options)
    group.use(others, our_types)
    set_name(group, backend)
    return group, prefixed
