"""The accelerator of this process: the one place that asks torch for its devices, streams, events and names.

Torch calls a kind of accelerator "cuda" (ROCm's, too), "xpu", "mps", or by the name that a private one has given itself
(`torch.utils.rename_privateuse1_backend`); of one process it knows one kind.

Invariants: nothing here begins with a device, which takes memory of it, unless it is asked for something that is on the
device. A kind that has no streams of its own is waited for as a whole. What a kind's module lacks is left out, never
guessed. What MPI can read of a device's memory is MPI's to say, and stands in `mpi/memory/device_aware.py`.
"""

from __future__ import annotations

from typing import Any

import torch

HOST = torch.device("cpu")
_OFF_DEVICE = ("cpu", "meta")
ONE_STREAM = ("mps",)  # its commands are one queue, and its memory is the host's, so there is nothing to pin
# What hides devices from a process, by what MPI calls their memory; the indices that stand there.
_VISIBLE = {
    "cuda": "CUDA_VISIBLE_DEVICES",
    "rocm": "HIP_VISIBLE_DEVICES",
    "level_zero": "ZE_AFFINITY_MASK",
}


# ---- which there are


def module_of(kind: str) -> Any:
    """What torch has for devices of this kind, such as `torch.cuda`."""
    return torch.get_device_module(kind)


def kind() -> str | None:
    """Of the accelerator that this process sees a device of; None where it sees none."""
    found = torch.accelerator.current_accelerator()
    return found.type if found is not None and module_of(found.type).is_available() else None


def num_devices() -> int:
    """How many of them this process sees."""
    found = kind()
    return 0 if found is None else int(module_of(found).device_count())


def all_devices() -> list[torch.device]:
    """Those that this process sees."""
    return [torch.device(str(kind()), index) for index in range(num_devices())]


def begin() -> None:
    """Begin with them, where there are any, as the first tensor on one does."""
    if (found := kind()) is not None and hasattr(module_of(found), "init"):
        module_of(found).init()


def is_begun() -> bool:
    """Whether this process has begun with its accelerator. One that was forked from a process that has, has not."""
    found = torch.accelerator.current_accelerator()
    if found is None:
        return False
    module = module_of(found.type)
    return bool(getattr(module, "is_initialized", module.is_available)())


def memory_kind(kind: str) -> str:
    """What MPI calls the memory of such devices; "" of those that it knows nothing of."""
    if kind == "cuda":
        return "rocm" if torch.version.hip else "cuda"
    return "level_zero" if kind == "xpu" else ""


def visible_variable(kind: str) -> str | None:
    """The variable of the environment that says which devices of a kind a process sees; None where none is known."""
    return _VISIBLE.get(memory_kind(kind))


# ---- one of them


def is_on_device(tensor: torch.Tensor) -> bool:
    """Whether its numbers lie in a device's memory."""
    return not tensor.is_cpu and tensor.device.type not in _OFF_DEVICE


def computes(device: torch.device) -> bool:
    """Whether this is an accelerator's, not the host."""
    return device.type not in _OFF_DEVICE


def of_rank(kind: str, local_rank: int) -> torch.device:
    """The one that a rank's number on its node falls on."""
    return torch.device(kind, local_rank % int(module_of(kind).device_count()))


def make_current(device: torch.device) -> None:
    """Have this thread compute on it, where there may be several."""
    if computes(device) and hasattr(module_of(device.type), "set_device"):
        module_of(device.type).set_device(device)


def pins(device: torch.device) -> bool:
    """Whether copies to and from it are faster, and asynchronous, with host memory that is pinned."""
    return computes(device) and device.type not in ONE_STREAM


def accelerator_pins() -> bool:
    """`pins` of the devices that this process sees."""
    return pins(torch.device(kind() or HOST))


def name_of(device: torch.device) -> str:
    """What its maker calls it; "cpu" of the host."""
    if not computes(device):
        return str(device)
    module = module_of(device.type)
    if hasattr(module, "get_device_name"):
        return str(module.get_device_name(device))
    return str(getattr(_properties(device), "name", device.type))


def memory_bytes_of(device: torch.device) -> int | None:
    """How much memory it has; None where torch does not say."""
    found = getattr(_properties(device), "total_memory", None)
    return None if found is None else int(found)


def uuid_of(device: torch.device) -> str | None:
    """What tells it from every other, of other nodes, too; None where torch does not say."""
    found = getattr(_properties(device), "uuid", None)
    return None if found is None else str(found)


def _properties(device: torch.device) -> Any:
    module = module_of(device.type)
    return module.get_device_properties(device) if hasattr(module, "get_device_properties") else None


# ---- waiting


def record(device: torch.device) -> torch.Event | None:
    """An event behind everything queued so far on this thread's current stream of the device."""
    return None if device.type in ONE_STREAM else torch.accelerator.current_stream(device).record_event()


def wait_for(event: torch.Event | None) -> None:
    """Wait on the host until the device has reached what `record` gave."""
    if event is None:
        torch.accelerator.synchronize()
    else:
        event.synchronize()


def wait_for_stream(device: torch.device) -> None:
    """Wait on the host for everything queued so far on this thread's current stream; at once for the host itself."""
    if computes(device):
        wait_for(record(device))


def wait_for_all(device: torch.device) -> None:
    """Wait on the host for everything queued so far on the device; at once for the host itself."""
    if computes(device):
        torch.accelerator.synchronize(device)


def for_future(tensor: torch.Tensor) -> list[int | str | torch.device] | None:
    """Where torch's Future has to be told that its value lies; None for the host."""
    return [tensor.device] if is_on_device(tensor) else None


class CopyStreams:
    """Copies between host and devices that do not queue behind what a device computes: on a stream of their own."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.Stream] = {}

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy, and wait on the host until it is done."""
        device = target.device if is_on_device(target) else source.device
        if device.type in ONE_STREAM:
            target.copy_(source)
            wait_for_all(device)
            return
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.Stream(device)
        with stream:
            target.copy_(source, non_blocking=True)
        stream.synchronize()
