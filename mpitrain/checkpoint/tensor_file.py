"""Writing safetensors files tensor by tensor, so that nobody has to hold all tensors, or all bytes, at once.

Invariants: a file has the bytes that safetensors' own `save_file` gives it, but for the order of the metadata. Tied
tensors are written once for each name. Names, dtypes and shapes have to be known before the first tensor, since they
stand at the beginning.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from mpitrain.torch_versions import dtypes

# In the order of the file: tensors of the last kinds come first, those of one kind by name.
_KINDS = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "I16": "int16", "U16": "uint16", "F16": "float16", "BF16": "bfloat16",
    "I32": "int32", "U32": "uint32", "F32": "float32", "C64": "complex64", "F64": "float64", "I64": "int64",
    "U64": "uint64",
}  # fmt: skip
_TYPES = dtypes(_KINDS.values())
_NAMES = {_TYPES[name]: kind for kind, name in _KINDS.items() if name in _TYPES}
DTYPES = frozenset(_NAMES)  # that a file can hold
_ORDER = {kind: number for number, kind in enumerate(_KINDS)}


class Described(NamedTuple):
    """A tensor without its numbers."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """In a file."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def describe(tensors: Mapping[str, torch.Tensor]) -> dict[str, Described]:
    """What `header` needs of tensors by name.

    Raises:
        TypeError: a tensor is sparse or quantized.
    """
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise TypeError(f"{name}: safetensors holds dense tensors, and this one is {tensor.type()}")
    return {name: Described(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def order_of(described: Mapping[str, Described]) -> list[str]:
    """The names in the order in which their tensors follow the header.

    Raises:
        TypeError: safetensors has no name for a dtype.
    """
    return sorted(described, key=lambda name: (-_ORDER[_kind(name, described[name])], name))


def _kind(name: str, tensor: Described) -> str:
    if tensor.dtype not in _NAMES:
        raise TypeError(f"{name}: safetensors cannot hold tensors of {tensor.dtype}")
    return _NAMES[tensor.dtype]


def header(described: Mapping[str, Described], metadata: Mapping[str, str] | None = None) -> bytes:
    """What a file begins with."""
    # a file's name may hold bytes that are no letters, and the format knows letters only
    told = {name: text.encode(errors="backslashreplace").decode() for name, text in (metadata or {}).items()}
    entries: dict[str, Any] = {"__metadata__": told} if metadata is not None else {}
    end = 0
    for name in order_of(described):
        tensor = described[name]
        begin, end = end, end + tensor.num_bytes
        kind = _kind(name, tensor)
        entries[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def body(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes in the file."""
    raw = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    if sys.byteorder == "big":
        width = tensor.dtype.itemsize // (2 if tensor.dtype.is_complex else 1)
        raw = raw.reshape(-1, width).flip(1).reshape(-1)
    numbers: Any = raw.numpy()
    return memoryview(numbers)
