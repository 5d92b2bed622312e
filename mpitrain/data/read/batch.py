"""What a batch is: what the dataset gives, as `torch.utils.data.default_collate` puts samples together.

A dict of tensors by name (HDF5 shards always), a `Pair`, a tuple, a named tuple, one tensor, nests of these with texts
and numbers among them, and objects of other libraries that have a `to(device)`. Whoever asks more of a batch than to
hand it on asks here.

Invariants: nothing here changes a batch that it is given; whatever is made of one has its structure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mpitrain.data.format.catalogue import OFFSETS
from mpitrain.errors import DataError, UsageError
from mpitrain.torch_versions import pytree

Batch = Any
NAMES = ("x", "y")


class Pair(tuple[Any, ...]):
    """The two values of a pair, or the one of a tuple of one: a tuple that also answers by the names "x" and "y", as a
    dict does, and takes assignments, as the list does that torch makes of a pair."""

    _by_name: dict[str, Any]

    def __new__(cls, values: Any) -> Pair:
        made = super().__new__(cls, values)
        made._by_name = dict(zip(NAMES, tuple.__iter__(made), strict=False))
        assert len(made._by_name) == tuple.__len__(made)
        return made

    def __iter__(self) -> Iterator[Any]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    def __getitem__(self, key: Any) -> Any:
        return self._by_name[key] if isinstance(key, str) else tuple(self)[key]

    def __setitem__(self, key: str | int, value: Any) -> None:
        self._by_name[key if isinstance(key, str) else list(self._by_name)[key]] = value

    def __contains__(self, key: object) -> bool:
        return key in self._by_name if isinstance(key, str) else any(key is one for one in self)

    def keys(self) -> Any:
        """The names."""
        return self._by_name.keys()

    def values(self) -> Any:
        """The values."""
        return self._by_name.values()

    def items(self) -> Any:
        """Names with values."""
        return self._by_name.items()

    def get(self, key: str, default: Any = None) -> Any:
        """As of a dict."""
        return self._by_name.get(key, default)

    def __repr__(self) -> str:
        return repr(tuple(self))

    def __reduce__(self) -> Any:
        return _rebuilt, (list(self), list(self._by_name))


def _rebuilt(values: Iterable[Any], names: Any) -> Any:
    """What was taken apart; a pair to which other names were added is a dict."""
    return Pair(values) if tuple(names) == NAMES[: len(names)] else dict(zip(names, values, strict=True))


pytree.register_pytree_node(Pair, lambda pair: (list(pair), list(pair.keys())), _rebuilt)


def as_batch(made: Any) -> Batch:
    """What a dataset, a `collate_fn` or a transform has made, as it is handed out: a pair answers by names, too.

    Raises:
        DataError: it holds nothing, or an object with tensors that nobody can move to a device.
    """
    if isinstance(made, Pair) or (type(made) in (tuple, list) and 1 <= len(made) <= len(NAMES)):
        made = _rebuilt(list(made), list(made.keys()) if isinstance(made, Pair) else NAMES[: len(made)])
    elif isinstance(made, Mapping) and not _moves_itself(made) and type(made) not in pytree.SUPPORTED_NODES:
        made = dict(made)
    leaves, structure = pytree.tree_flatten(made, is_leaf=_moves_itself)
    if not leaves:
        raise DataError("an empty batch")
    if all(isinstance(one, torch.Tensor) for one in leaves):
        return made
    return pytree.tree_unflatten([_leaf(one) for one in leaves], structure)


def _leaf(one: Any) -> Any:
    """A value that a batch can hold; arrays of numbers are tensors."""
    if isinstance(one, np.ndarray) and one.dtype.kind in "biufc":
        return torch.from_numpy(one)
    if not _moves_itself(one) and any(isinstance(part, torch.Tensor) for part in _parts(one)):
        raise DataError(
            f"a batch that holds a {type(one).__name__} with tensors, which nobody can move to a device: give it a "
            "method to(device) that returns it, or return a dict, a tuple or a named tuple"
        )
    return one


def _parts(one: object) -> list[Any]:
    slots = (getattr(one, name, None) for name in getattr(type(one), "__slots__", ()))
    return [*slots, *getattr(one, "__dict__", {}).values()]


def _moves_itself(one: object) -> bool:
    return callable(getattr(one, "to", None)) and not isinstance(one, type)


def to_device(batch: Batch, device: Any) -> Batch:
    """The batch, its tensors on the device."""
    if type(batch) is dict and all(isinstance(one, torch.Tensor) for one in batch.values()):
        return {name: one.to(device, non_blocking=True) for name, one in batch.items()}
    return map_leaves(lambda one: _moved(one, device), batch)


def _moved(one: Any, device: Any) -> Any:
    if isinstance(one, torch.Tensor):
        return one.to(device, non_blocking=True)
    if not _moves_itself(one):
        return one
    moved = one.to(device)
    return one if moved is None else moved  # as of a module, some move in place


def pinned(batch: Batch) -> Batch:
    """The batch, its tensors in pinned memory."""
    return map_leaves(lambda one: one.pin_memory() if hasattr(one, "pin_memory") else one, batch)


def map_leaves(function: Callable[[Any], Any], batch: Batch) -> Batch:
    """The batch with `function(leaf)` for each tensor, each object that moves itself, and each other value."""
    return pytree.tree_map(function, batch, is_leaf=_moves_itself)


def only_tensors(batch: Batch) -> bool:
    """Whether it holds tensors and nothing else."""
    return all(isinstance(one, torch.Tensor) for one in pytree.tree_leaves(batch, is_leaf=_moves_itself))


def device_of(batch: Batch) -> torch.device:
    """Where its first tensor is; where none is seen, the host."""
    leaves = pytree.tree_leaves(batch, is_leaf=_moves_itself)
    seen = (one.device for one in leaves if isinstance(getattr(one, "device", None), torch.device))
    return next(seen, torch.device("cpu"))


def values_of(batch: Batch) -> dict[str, Any]:
    """The values of a batch by name: those of a tuple are called "0", "1" and so on, a tensor alone "x"."""
    if isinstance(batch, Mapping | Pair):
        return {str(name): one for name, one in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return dict(zip(batch._fields, batch, strict=True))
    if isinstance(batch, tuple | list):
        return {str(number): one for number, one in enumerate(batch)}
    return {"x": batch}


def tensors_of(batch: Batch) -> dict[str, torch.Tensor]:
    """All tensors of a batch by name; those of nests as "outer.inner"."""
    found: dict[str, torch.Tensor] = {}
    for name, one in values_of(batch).items():
        if isinstance(one, torch.Tensor):
            found[name] = one
        elif isinstance(one, Mapping | tuple | list):
            found |= {f"{name}.{inner}": tensor for inner, tensor in tensors_of(one).items()}
    return found


def num_samples_in(batch: Batch) -> int | None:
    """How many samples a batch has: the rows of its first tensor. None where it does not show: an object, or lists of
    what each sample has."""
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.dim() else 0
    if isinstance(batch, Mapping) and (offsets := _first_offsets(batch)) is not None:
        return len(offsets) - 1
    if not isinstance(batch, Mapping | tuple | list):
        return None
    values = list(batch.values() if isinstance(batch, Mapping) else batch)
    for one in values:
        if isinstance(one, torch.Tensor):
            return num_samples_in(one)
    for one in values:
        if isinstance(one, Mapping) or hasattr(one, "_fields"):
            return num_samples_in(one)
    return next((len(one) for one in values if is_column(one)), None)


def _first_offsets(batch: Mapping[Any, Any]) -> Any:
    """Of a variable array that comes first."""
    name = next(iter(batch), "")
    if not isinstance(name, str):
        return None
    if name.endswith(OFFSETS) and name.removesuffix(OFFSETS) in batch:
        return batch[name]
    return batch.get(name + OFFSETS)


def is_column(one: object) -> bool:
    """Whether it is a list of what is neither tensor nor nest, such as texts, one for each sample."""
    return isinstance(one, list | tuple) and not any(
        isinstance(each, torch.Tensor | Mapping | list | tuple) for each in one
    )


def cut(batch: Batch, num_parts: int) -> list[Batch]:
    """The batch in `num_parts` parts of as many samples.

    Raises:
        UsageError: it holds something that cannot be cut.
    """
    if isinstance(batch, Mapping) and any(f"{name}{OFFSETS}" in batch for name in batch):
        raise UsageError("pipeline: cannot cut arrays whose samples differ in length; take another strategy")
    num_samples = num_samples_in(batch)

    def pieces(one: Any) -> Sequence[Any]:
        if isinstance(one, torch.Tensor) and one.dim() and len(one) == num_samples:
            return one.chunk(num_parts)
        if is_column(one) and len(one) == num_samples:
            size = -(-len(one) // num_parts)
            return [one[number * size : (number + 1) * size] for number in range(num_parts)]
        raise UsageError(
            f"pipeline: cannot cut a batch of {describe(batch)} into microbatches: every value needs a row for each "
            "sample; take another strategy"
        )

    leaves, structure = pytree.tree_flatten(batch, is_leaf=lambda one: _moves_itself(one) or is_column(one))
    parts = zip(*(pieces(one) for one in leaves), strict=True)
    return [pytree.tree_unflatten(part, structure) for part in parts]


def join(batches: Sequence[Batch]) -> Batch:
    """One batch of several; the entries of variable arrays go with their offsets."""
    first = batches[0]
    if len(batches) == 1:
        return first
    if isinstance(first, dict):
        columns = {name: [batch[name] for batch in batches] for name in first}
        for name in columns:
            if isinstance(name, str) and name.endswith(OFFSETS) and name.removesuffix(OFFSETS) in first:
                ends = columns[name][:1]
                for tensor in columns[name][1:]:
                    ends.append(tensor[1:] + ends[-1][-1])
                columns[name] = ends
        return {name: _joined(parts) for name, parts in columns.items()}
    return _joined(batches)


def _joined(parts: Sequence[Any]) -> Any:
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(parts))
    if is_column(first):
        return [one for part in parts for one in part]
    if isinstance(first, Mapping | tuple | list) and not _moves_itself(first):
        values = [list(part.values() if isinstance(part, Mapping) else part) for part in parts]
        structure = pytree.tree_structure(first, is_leaf=lambda one: one is not first)
        return pytree.tree_unflatten([_joined(column) for column in zip(*values, strict=True)], structure)
    raise UsageError(
        f"batches that hold {type(first).__name__} cannot be put together; give a dict of tensors"
    )


def describe(batch: Batch) -> str:
    """What a batch holds, and how to reach it, in a few words."""
    if isinstance(batch, Mapping):
        names = list(batch)
        unpacked = f", or {', '.join(map(str, names))} = batch.values()" if 1 < len(names) < 5 else ""
        return f"{_listed(names)} by name: batch[{names[0]!r}]{unpacked}" if names else "nothing"
    if isinstance(batch, Pair):
        names = list(batch.keys())
        unpacked = ", ".join(names) + "," * (len(names) == 1)
        return f"a tuple of {len(names)}, {_listed(names)}: {unpacked} = batch, or batch['x']"
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return f"a {type(batch).__name__} of {', '.join(batch._fields)}: batch.{batch._fields[0]}"
    if isinstance(batch, tuple | list):
        last = f"batch[{len(batch) - 1}]"
        return f"a {type(batch).__name__} of {len(batch)} without names: batch[0] to {last}"
    if isinstance(batch, torch.Tensor):
        return f"one tensor of shape {tuple(batch.shape)}: the batch itself, as in model(batch)"
    return f"a {type(batch).__name__}"


def reach(batch: Batch, name: str) -> str:
    """The text that takes a value of `values_of(batch)` out of it."""
    if isinstance(batch, Mapping | Pair):
        return f"batch[{name!r}]"
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return f"batch.{name}"
    return f"batch[{name}]" if isinstance(batch, tuple | list) else "batch"


def _listed(names: Sequence[object]) -> str:
    return ", ".join(map(repr, names))
