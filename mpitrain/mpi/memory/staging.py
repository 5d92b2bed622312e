"""Device tensors by way of host memory: reused pinned buffers, and the waiting that MPI cannot do itself.

Invariants: MPI sees memory only after the kernels that write it have finished, and no code sees a received tensor
before the copy back has finished. Both waits are host waits, on an event and on our own copy stream:
MPI's own calls know no streams. Used only by the thread that owns MPI, so it has no locks. The tests
run it with a stand-in for `TorchDevice`, and `make gpu` with a GPU.
"""

from typing import Any, Protocol

import torch

from mpitrain.devices import accelerator


class Accelerator(Protocol):
    """What staging needs of a device; `TorchDevice` is the real one."""

    def owns(self, tensor: torch.Tensor) -> bool:
        """True if the tensor lies in this device's memory."""

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """A new host buffer (uint8) the device copies from and to at full speed."""

    def record_event(self, tensor: torch.Tensor) -> Any:
        """An event behind everything queued so far on the calling thread's current stream of the tensor's device."""

    def wait_for(self, event: object) -> None:
        """Wait on the host until the device has reached `event`."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between host and device and wait on the host until it is done."""


class TorchDevice:
    """Whatever accelerator torch has here."""

    def __init__(self) -> None:
        self._streams = accelerator.CopyStreams()

    def owns(self, tensor: torch.Tensor) -> bool:
        """True for tensors in device memory."""
        return accelerator.is_on_device(tensor)

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Page-locked host memory, where the accelerator is faster with it."""
        with torch.inference_mode(False):  # it is written again, perhaps outside of the mode
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=accelerator.accelerator_pins())

    def record_event(self, tensor: torch.Tensor) -> Any:
        """An event recorded on the current stream of the tensor's device."""
        return accelerator.record(tensor.device)

    def wait_for(self, event: Any) -> None:
        """Block the host until the event has happened."""
        accelerator.wait_for(event)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy on a stream of our own, so that it does not queue behind the next kernels of the backward pass."""
        self._streams.copy(target, source)


class Pool:
    """Pinned buffers by size, in powers of two: pinning costs far more than the copy, so they are kept for ever."""

    def __init__(self, accelerator: Accelerator):
        self._accelerator = accelerator
        self._free: dict[int, list[torch.Tensor]] = {}

    def take(self, num_bytes: int) -> torch.Tensor:
        """A uint8 buffer of at least `num_bytes`; give it back with `give`."""
        size = 1 << max(num_bytes - 1, 4095).bit_length()
        free = self._free.get(size)
        return free.pop() if free else self._accelerator.pinned(size)

    def give(self, buffer: torch.Tensor) -> None:
        """Return a buffer that `take` gave."""
        self._free.setdefault(buffer.numel(), []).append(buffer)
