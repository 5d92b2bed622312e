"""A state tree (dicts, lists, tuples, numbers, texts, tensors) as JSON plus named tensors, and back.

Law of this file: what comes back is what went in, types and keys included; what JSON and safetensors cannot hold is
refused by name, so nothing is ever pickled. Tensors are stored contiguous, on the host.
"""

from __future__ import annotations

import math
from typing import Any

import torch

_TENSOR, _PAIRS, _TUPLE, _FLOAT = "__tensor__", "__pairs__", "__tuple__", "__float__"


def split(tree: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """JSON-able structure and the tensors it refers to by name.

    Raises:
        TypeError: a value of a type that is not listed above, with its place.
    """
    tensors: dict[str, torch.Tensor] = {}
    return _split(tree, "state", tensors), tensors


def _split(value: Any, place: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors[place] = value.detach().cpu().contiguous()
        return {_TENSOR: place}
    if isinstance(value, dict):
        pairs = {key: _split(item, f"{place}/{key}", tensors) for key, item in value.items()}
        plain = all(isinstance(key, str) and not key.startswith("__") for key in pairs)
        return pairs if plain else {_PAIRS: [[key, item] for key, item in pairs.items()]}
    if isinstance(value, tuple):
        return {_TUPLE: [_split(item, f"{place}/{i}", tensors) for i, item in enumerate(value)]}
    if isinstance(value, list):
        return [_split(item, f"{place}/{i}", tensors) for i, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{place}: a checkpoint cannot hold a {type(value).__qualname__}")


def join(structure: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """The tree that `split` took apart."""
    if isinstance(structure, list):
        return [join(item, tensors) for item in structure]
    if not isinstance(structure, dict):
        return structure
    if _TENSOR in structure:
        return tensors[structure[_TENSOR]]
    if _PAIRS in structure:
        return {key: join(item, tensors) for key, item in structure[_PAIRS]}
    if _TUPLE in structure:
        return tuple(join(item, tensors) for item in structure[_TUPLE])
    if _FLOAT in structure:
        return float(structure[_FLOAT])
    return {key: join(item, tensors) for key, item in structure.items()}
