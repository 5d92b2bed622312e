"""Modules and tensors on a device, each parameter the object that it was.

Optimizers hold parameters, and go on with those objects. Torch puts memory of another device into the same object where
it knows the kind of device; of a private one it makes new objects, and an optimizer that was made before would go on
stepping what nobody computes with.
"""

from __future__ import annotations

import threading

import torch
from torch import nn

_ONE_AT_A_TIME = threading.Lock()  # torch's setting is one of the process, whose replicas may be threads


def move(module: nn.Module, device: torch.device) -> nn.Module:
    """`module.to(device)`, with the same parameters."""
    with _ONE_AT_A_TIME:
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(swaps or not _takes_memory_of(device))
        try:
            return module.to(device)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(swaps)


def put(tensor: torch.Tensor, device: torch.device) -> None:
    """Have a parameter, or another tensor that nothing was computed with, lie on the device."""
    value = tensor.data.to(device)
    if _takes_memory_of(device):
        tensor.data = value
    elif isinstance(tensor, nn.Parameter):
        torch.utils.swap_tensors(tensor, nn.Parameter(value, requires_grad=tensor.requires_grad))
    else:
        torch.utils.swap_tensors(tensor, value)


def _takes_memory_of(device: torch.device) -> bool:
    """Whether a tensor of the host's can be given a device's memory."""
    try:
        torch.empty(0).data = torch.empty(0, device=device)
    except RuntimeError:
        return False
    return True
