"""What torch asks of a process group besides operations: names, devices, what it supports, how it fares.

Invariants: the group answers itself, on every version of torch. torch 2.14 and later forward what a group leaves out to
a backend of C++, and ask for more: windows and reconfiguration, hooks, errors, sequence numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from mpitrain.devices import accelerator
from mpitrain.mpi.faults.errors import is_dead_peer
from mpitrain.mpi.process_group.base import GroupBase
from mpitrain.mpi.process_group.work import MpiWork
from mpitrain.torch_backend import BACKEND
from mpitrain.torch_versions import ErrorType

_NO_RECONFIGURE = "this group cannot be made anew: only the default group can, after enable_reconfigure=True"


class Answers(GroupBase):
    """Names, devices, timeouts, what is supported, errors, coalescing."""

    _name = _desc = ""
    _coalescing: list[MpiWork] | None = None

    def getBackendName(self) -> str:
        """ "mpi4py"."""
        return BACKEND

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """The name torch gave this group."""
        return self._name

    def _set_group_name(self, name: Any) -> None:
        self._name = name
        super()._set_group_name(name)  # what C++ sees of the group

    @property
    def group_desc(self) -> str:
        """The description torch gave this group."""
        return self._desc

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc
        super()._set_group_desc(desc)

    def set_timeout(self, timeout: timedelta) -> None:
        """The timeout of every operation from now on."""
        self._timeout = timeout

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    # ---- devices

    def _get_backend(self, device: torch.device) -> Any:
        """What carries tensors of this device: the group itself."""
        return self

    def get_backend(self, device: torch.device) -> Any:
        """The same, by the name that torch 2.14 gives it."""
        return self._get_backend(device)

    @property
    def _device_types(self) -> list[torch.device]:
        """What torch's checkpoints ask for: on which devices tensors may lie."""
        found = accelerator.kind()
        return [torch.device(kind) for kind in ("cpu", found) if kind is not None]

    # ---- what is supported

    supports_splitting = supports_time_estimate = supports_shrinking = supports_window = False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """False: whoever asks allocates memory himself."""
        return False

    def new_window(self, tensor: torch.Tensor | None = None) -> Any:
        """Refused: MPI could do it, and nothing in torch uses it yet."""
        raise NotImplementedError(
            f'the backend "{BACKEND}" has no windows (torch.distributed._supports_window() is False): send and receive'
            " instead, or make an mpi4py.MPI.Win inside mpitrain.exclusive_mpi()"
        )

    @property
    def supports_reconfigure(self) -> bool:
        """False: see `reconfigure`."""
        return False

    def get_reconfigure_handle(self) -> str:
        """Refused: see `reconfigure`."""
        raise NotImplementedError(_NO_RECONFIGURE)

    def reconfigure(self, options: object) -> MpiWork:
        """Refused."""
        raise NotImplementedError(_NO_RECONFIGURE)

    # ---- how it fares

    def get_error(self) -> ErrorType:
        """TIMEOUT, where not all ranks have come in time; REMOTE_ERROR, where one has died; COMM_ERROR, where the ranks
        or MPI have given up otherwise; SUCCESS."""
        if self._failure is None:
            return ErrorType.SUCCESS
        if isinstance(self._failure, TimeoutError):
            return ErrorType.TIMEOUT
        return ErrorType.REMOTE_ERROR if is_dead_peer(self._failure) else ErrorType.COMM_ERROR

    def register_abort_hook(self, hook_id: int, hook: Callable[[], None]) -> None:
        """Have `hook()` called before the group is aborted, and once this rank has met a failure after which it carries
        nothing more; then in a thread of its own."""
        self._abort_hooks[hook_id] = hook

    def unregister_abort_hook(self, hook_id: int) -> None:
        """Have a hook called no more."""
        self._abort_hooks.pop(hook_id, None)

    def _get_sequence_number_for_group(self) -> int:
        """How many collectives this rank has begun in this group."""
        return self._num_collectives

    # ---- several operations as one (dist._coalescing_manager with a device, batch_isend_irecv)

    @property
    def supports_coalescing(self) -> bool:
        """True: between `_start_coalescing` and `_end_coalescing` every Work is remembered."""
        return True

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalescing = []

    def _end_coalescing(self, device: torch.device) -> MpiWork:
        """A Work that is done when all since `_start_coalescing` are."""
        works, self._coalescing = self._coalescing or [], None
        return MpiWork.of_all(self._engine, works, self._timeout)

    def _remember(self, work: MpiWork) -> MpiWork:
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work
