"""A state tree (dicts, lists, tuples, numbers, texts, tensors, and NumPy's of these) as JSON plus numbered tensors, and
back.

Invariants: what comes back is what went in, types and keys included; what JSON and safetensors cannot hold is refused
with its place, so nothing is ever pickled, and what `split` has not made is refused by `join`. Tensors are stored
contiguous, on the host, and named by their number, so no key can stand for another's tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from mpitrain.checkpoint.tensor_file import DTYPES
from mpitrain.torch_versions import dtypes

_TENSOR, _PAIRS, _TUPLE, _FLOAT = "__tensor__", "__pairs__", "__tuple__", "__float__"
_COMPLEX, _DTYPE, _DEVICE = "__complex__", "__dtype__", "__device__"
_SCALAR, _ARRAY, _NUMPY_DTYPE = "__numpy__", "__array__", "__numpy_dtype__"
_MAX_DEPTH = 100
_MAX_INT_BITS = 10_000  # Python reads no longer numbers from JSON
_NUMPY_TYPES = {
    np.dtype(name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
}

Keep = Callable[[torch.Tensor], str]  # answers with the name under which a tensor is found


def split(tree: object) -> tuple[Any, dict[str, torch.Tensor]]:
    """JSON-able structure and the tensors it refers to by number.

    Raises:
        TypeError: a value of a type that is not listed above, or nested too deep, with its place.
    """
    tensors: dict[str, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> str:
        name = str(len(tensors))
        tensors[name] = tensor.detach().cpu().contiguous()
        return name

    return _split(tree, "state", keep, 0), tensors


def structure_of(tree: object) -> Any:
    """What `split` would make of it, without the tensors: none is copied.

    Raises:
        TypeError: as `split`.
    """
    return _split(tree, "state", lambda tensor: "0", 0)


def _split(value: object, place: str, keep: Keep, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise TypeError(f"{place[:80]}...: a checkpoint cannot hold what is nested deeper than {_MAX_DEPTH}")
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_meta or value.is_quantized:
            raise TypeError(f"{place}: a checkpoint holds plain tensors only, not {value.layout}")
        if value.dtype not in DTYPES:
            raise TypeError(f"{place}: a checkpoint cannot hold a tensor of {value.dtype}")
        return {_TENSOR: keep(value)}
    if isinstance(value, np.ndarray):
        if value.dtype not in _NUMPY_TYPES or (tensor := torch.from_numpy(value.copy())).dtype not in DTYPES:
            raise TypeError(f"{place}: a checkpoint cannot hold a NumPy array of {value.dtype}")
        return {_ARRAY: keep(tensor)}
    if isinstance(value, dict):
        pairs = {key: _split(item, f"{place}/{key}", keep, depth + 1) for key, item in value.items()}
        if all(isinstance(key, str) and not key.startswith("__") for key in pairs):
            return pairs
        return {_PAIRS: [[_key(key, place), item] for key, item in pairs.items()]}
    if isinstance(value, list | tuple):
        items = [_split(item, f"{place}/{i}", keep, depth + 1) for i, item in enumerate(value)]
        return {_TUPLE: items} if isinstance(value, tuple) else items
    return _plain(value, place)


def _plain(value: object, place: str) -> Any:
    if isinstance(value, np.generic) and value.dtype in _NUMPY_TYPES:  # float64 is a float, too
        return {_SCALAR: [value.dtype.name, _plain(value.item(), place)]}
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: str(value)}
    if isinstance(value, int) and value.bit_length() > _MAX_INT_BITS:
        raise TypeError(f"{place}: a checkpoint cannot hold a number of {value.bit_length()} bits")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, complex):
        return {_COMPLEX: [_plain(value.real, place), _plain(value.imag, place)]}
    if isinstance(value, torch.dtype):
        return {_DTYPE: str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {_DEVICE: str(value)}
    if isinstance(value, np.dtype) and value in _NUMPY_TYPES:
        return {_NUMPY_DTYPE: value.name}
    raise TypeError(f"{place}: a checkpoint cannot hold a {type(value).__qualname__}")


def _key(key: object, place: str) -> Any:
    if isinstance(key, tuple):
        return {_TUPLE: [_key(item, place) for item in key]}
    return _plain(key, f"{place}, a key")


def join(structure: object, tensors: dict[str, torch.Tensor]) -> Any:
    """The tree that `split` took apart.

    Raises:
        KeyError, TypeError, ValueError, RecursionError: `split` has made no such structure.
    """
    if isinstance(structure, list):
        return [join(item, tensors) for item in structure]
    if not isinstance(structure, dict):
        return structure
    if not any(key.startswith("__") for key in structure):
        return {key: join(item, tensors) for key, item in structure.items()}
    ((kind, content),) = structure.items()
    return _JOINS[kind](content, tensors)


def _listed(content: object, number: int | None = None) -> list[Any]:
    if not isinstance(content, list) or (number is not None and len(content) != number):
        raise ValueError("a list of another length, or none")
    return content


def _text(content: object) -> str:
    if not isinstance(content, str):
        raise TypeError(f"a text, not a {type(content).__name__}")
    return content


def _join_pairs(content: object, tensors: dict[str, torch.Tensor]) -> dict[Any, Any]:
    pairs = [_listed(pair, 2) for pair in _listed(content)]
    return {join(key, tensors): join(item, tensors) for key, item in pairs}


def _join_scalar(content: object, tensors: dict[str, torch.Tensor]) -> Any:
    name, value = _listed(content, 2)
    return _numpy_dtype(name).type(join(value, tensors))


def _join_array(content: Any, tensors: dict[str, torch.Tensor]) -> Any:
    found: Any = tensors[content]
    return found if found is None else found.numpy()


def _numpy_dtype(name: object) -> np.dtype[Any]:
    found = np.dtype(_text(name))
    if found not in _NUMPY_TYPES:
        raise ValueError(f"{name!r:.80} is no type of NumPy's numbers")
    return found


def _dtype(name: object) -> torch.dtype:
    found = dtypes([_text(name)])
    if not found:
        raise ValueError(f"{name!r:.80} is no type of torch's numbers")
    return next(iter(found.values()))


_JOINS: dict[str, Callable[[Any, dict[str, torch.Tensor]], Any]] = {
    _TENSOR: lambda content, tensors: tensors[content],
    _PAIRS: _join_pairs,
    _TUPLE: lambda content, tensors: tuple(join(item, tensors) for item in _listed(content)),
    _FLOAT: lambda content, tensors: float(_text(content)),
    _COMPLEX: lambda content, tensors: complex(*(join(part, tensors) for part in _listed(content, 2))),
    _DTYPE: lambda content, tensors: _dtype(content),
    _DEVICE: lambda content, tensors: torch.device(_text(content)),
    _SCALAR: _join_scalar,
    _ARRAY: _join_array,
    _NUMPY_DTYPE: lambda content, tensors: _numpy_dtype(content),
}
