"""Random numbers where they are drawn: the generators of the host and of the accelerator's devices.

Invariants: a device that this process has not begun with is neither seeded nor asked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from mpitrain.devices import accelerator


def generators() -> list[torch.Generator]:
    """The host's, and that of the device that this thread computes on, if this process has begun with it."""
    found: list[torch.Generator] = [torch.default_generator]
    if accelerator.is_begun() and (name := accelerator.kind()) is not None:
        module = accelerator.module_of(name)
        if hasattr(module, "default_generators"):
            found.append(module.default_generators[module.current_device()])
        elif name == "mps":
            found.append(module._get_default_mps_generator())
    return found


def seed_devices(number: int) -> None:
    """Seed the generators of all devices of the accelerator that this process has begun with."""
    if accelerator.is_begun() and (name := accelerator.kind()) is not None:
        module = accelerator.module_of(name)
        (module.manual_seed_all if hasattr(module, "manual_seed_all") else module.manual_seed)(number)


def forked_draws(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Within it the generators of the host and of the device are drawn from without a trace."""
    if not accelerator.computes(device):
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device], device_type=device.type)


class RandomStates:
    """Those of the host and of devices (all that this process has begun with, unless some are named), as they are
    now."""

    def __init__(self, devices: Sequence[torch.device] | None = None) -> None:
        if devices is None:
            devices = accelerator.all_devices() if accelerator.is_begun() else []
        self._host = torch.get_rng_state()
        self._states = {
            device: accelerator.module_of(device.type).get_rng_state(*_which(device))
            for device in devices
            if accelerator.computes(device)
        }

    def restore(self) -> None:
        """Go back to them."""
        torch.set_rng_state(self._host)
        for device, state in self._states.items():
            accelerator.module_of(device.type).set_rng_state(state, *_which(device))


def _which(device: torch.device) -> tuple[torch.device, ...]:
    """How a module is told of which device; MPS has one, and takes no argument."""
    return () if device.type in accelerator.ONE_STREAM else (device,)
