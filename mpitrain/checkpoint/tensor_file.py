"""Safetensors files tensor by tensor, so that nobody has to hold all tensors, or all bytes, at once.

Invariants: a file has the bytes that safetensors' own `save_file` gives it, but for the order of the metadata. Tied
tensors are written once for each name. Names, dtypes and shapes have to be known before the first tensor, since they
stand at the beginning; whoever reads that makes the tensors, and fills them in their order. A file that is read may be
hostile: what is made has as many bytes as follow, and what follows is covered once.
"""

from __future__ import annotations

import json
import math
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
LENGTH_BYTES = 8  # of the number before the header's text
MAX_HEADER_BYTES = 10**8  # as safetensors has it
_ORDER = {kind: number for number, kind in enumerate(_KINDS)}


class Described(NamedTuple):
    """A tensor without its numbers."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """In a file."""
        return math.prod(self.shape) * self.dtype.itemsize


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
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def described_by(text: bytes, num_bytes: int) -> dict[str, Described]:
    """What a header, without its length, says of the `num_bytes` that follow it, in their order.

    Raises:
        ValueError, TypeError, KeyError, AttributeError, RecursionError: it is no header, or one of other bytes.
    """
    entries = json.loads(text)
    entries.pop("__metadata__", None)
    found, end = {}, 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        shape, offsets = entry["shape"], entry["data_offsets"]
        if not all(type(number) is int and number >= 0 for number in (*shape, *offsets)):
            raise ValueError(f"{name!r:.80} has a shape or a place that is none")
        found[name] = Described(_TYPES[_KINDS[entry["dtype"]]], tuple(shape))
        begin, end = end, end + found[name].num_bytes
        if offsets != [begin, end]:
            raise ValueError(f"{name!r:.80} does not lie where the tensor before it ends")
    if end != num_bytes:
        raise ValueError(f"{end} bytes of tensors instead of {num_bytes}")
    return found


def body(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes in the file."""
    raw = _raw(tensor.detach().cpu().resolve_conj().resolve_neg().contiguous())
    if sys.byteorder == "big":
        raw = _turned(raw, tensor.dtype)
    numbers: Any = raw.numpy()
    return memoryview(numbers)


def room_of(tensor: torch.Tensor) -> memoryview:
    """Where a new tensor's bytes in a file are read to; `settle` follows."""
    numbers: Any = _raw(tensor).numpy()
    return memoryview(numbers)


def settle(tensor: torch.Tensor) -> None:
    """The bytes of a file are there; make them this machine's."""
    if sys.byteorder == "big":
        raw = _raw(tensor)
        raw.copy_(_turned(raw, tensor.dtype))


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _turned(raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """With the bytes of each number in the other order."""
    width = dtype.itemsize // (2 if dtype.is_complex else 1)
    return raw.reshape(-1, width).flip(1).reshape(-1)
