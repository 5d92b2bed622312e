"""A state tree (dicts, lists, tuples, numbers, texts, tensors) as JSON plus numbered tensors, and back.

Invariants: what comes back is what went in, types and keys included; what JSON and safetensors cannot hold is refused
with its place, so nothing is ever pickled. Tensors are stored contiguous, on the host, and named by their number, so no
key can stand for another's tensor.
"""

from __future__ import annotations

import math
from typing import Any

import torch

_TENSOR, _PAIRS, _TUPLE, _FLOAT = "__tensor__", "__pairs__", "__tuple__", "__float__"
_MAX_DEPTH = 100
_MAX_INT_BITS = 10_000  # Python reads no longer numbers from JSON


def split(tree: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """JSON-able structure and the tensors it refers to by number.

    Raises:
        TypeError: a value of a type that is not listed above, or nested too deep, with its place.
    """
    tensors: dict[str, torch.Tensor] = {}
    return _split(tree, "state", tensors, 0), tensors


def _split(value: Any, place: str, tensors: dict[str, torch.Tensor], depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise TypeError(f"{place[:80]}...: a checkpoint cannot hold what is nested deeper than {_MAX_DEPTH}")
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_meta or value.is_quantized:
            raise TypeError(f"{place}: a checkpoint holds plain tensors only, not {value.layout}")
        name = str(len(tensors))
        tensors[name] = value.detach().cpu().contiguous()
        return {_TENSOR: name}
    if isinstance(value, dict):
        pairs = {key: _split(item, f"{place}/{key}", tensors, depth + 1) for key, item in value.items()}
        if all(isinstance(key, str) and not key.startswith("__") for key in pairs):
            return pairs
        return {_PAIRS: [[_key(key, place), item] for key, item in pairs.items()]}
    if isinstance(value, list | tuple):
        items = [_split(item, f"{place}/{i}", tensors, depth + 1) for i, item in enumerate(value)]
        return {_TUPLE: items} if isinstance(value, tuple) else items
    return _plain(value, place)


def _plain(value: Any, place: str) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: str(value)}
    if isinstance(value, int) and value.bit_length() > _MAX_INT_BITS:
        raise TypeError(f"{place}: a checkpoint cannot hold a number of {value.bit_length()} bits")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{place}: a checkpoint cannot hold a {type(value).__qualname__}")


def _key(key: Any, place: str) -> Any:
    if isinstance(key, tuple):
        return {_TUPLE: [_key(item, place) for item in key]}
    return _plain(key, f"{place}, a key")


def join(structure: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """The tree that `split` took apart.

    Raises:
        KeyError, TypeError, ValueError, RecursionError: `split` has made no such structure.
    """
    if isinstance(structure, list):
        return [join(item, tensors) for item in structure]
    if not isinstance(structure, dict):
        return structure
    if _TENSOR in structure:
        return tensors[structure[_TENSOR]]
    if _PAIRS in structure:
        return {join(key, tensors): join(item, tensors) for key, item in structure[_PAIRS]}
    if _TUPLE in structure:
        return tuple(join(item, tensors) for item in structure[_TUPLE])
    if _FLOAT in structure:
        return float(structure[_FLOAT])
    return {key: join(item, tensors) for key, item in structure.items()}
