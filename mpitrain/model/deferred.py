"""Building a module without its large tensors, and making them later, one after another, with the values that the
constructor would have given them.

Invariants: what is made later is the same bits. The constructor runs once, on the meta device: what it does to large
tensors is recorded, with the state of the random numbers where it draws some, and is done again for one tensor when
that is asked for. The random numbers move on as if the tensors had been filled. What cannot be recorded (a large tensor
whose numbers are read or loaded, a generator of the constructor's own, a tensor that the module neither has as a
parameter nor as a buffer) raises `CannotDefer`; then the module has to be built whole.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

SMALL = 1024  # numbers; tensors with fewer are made at once


_PLACES = [getattr(torch.Tensor, name).__get__ for name in ("is_meta", "device", "is_cpu")]


class CannotDefer(Exception):
    """The constructor does something that cannot be recorded."""


class _Call(NamedTuple):
    """One recorded operation; its tensors are aliases of the constructor's, which hold nothing."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    written: frozenset[int]
    read: frozenset[int]
    made: list[torch.Tensor]
    random_state: torch.Tensor | None


class Deferred(TorchDispatchMode):
    """Records what a constructor does to large tensors while it is entered; `fill` then makes them."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[_Call] = []
        self._tied: set[int] = set()
        self._filled: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by the first one's id

    def build(self, make: Callable[[], nn.Module]) -> nn.Module:
        """What `make` returns, its large parameters and buffers on the meta device.

        Raises:
            CannotDefer: it cannot be built so. Whatever else `make` raises may be for the same reason.
        """
        with self, _Unasked():
            module = make()
        if isinstance(module, nn.Module):
            self._check(module)
            uses = Counter(
                id(one)
                for part in module.modules()
                for one in (*part._parameters.values(), *part._buffers.values())
            )
            self._tied = {number for number, count in uses.items() if count > 1}
        return module

    def fill(self, module: nn.Module, device: torch.device) -> None:
        """Make the parameters and buffers of `module` that are still missing; random numbers stand still."""
        state = torch.get_rng_state()
        try:
            with torch.no_grad():
                for layer in module.modules():
                    for held in (layer._parameters, layer._buffers):
                        for name, tensor in list(held.items()):
                            if tensor is not None and tensor.is_meta:
                                setattr(layer, name, self._made(tensor, device))
        finally:
            torch.set_rng_state(state)

    def _made(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if id(tensor) in self._filled:  # tied
            return self._filled[id(tensor)][1]
        made = self._replay(tensor).to(device)
        if made.untyped_storage().nbytes() != made.numel() * made.element_size():
            made = made.clone()
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, requires_grad=tensor.requires_grad)
        vars(made).update(vars(tensor))
        if id(tensor) in self._tied:
            self._filled[id(tensor)] = tensor, made
        return made

    # ---- recording

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = list(_tensors((args, kwargs)))
        if any(tensor.is_meta for tensor in given):
            return self._record(func, args, kwargs)
        devices = [argument.name for argument in func._schema.arguments if argument.name == "device"]
        if given or not devices:
            return func(*args, **kwargs)
        if torch.device(kwargs.get("device") or "cpu").type not in ("cpu", "meta"):
            raise CannotDefer("it makes tensors on a device")
        real = {**kwargs, "device": torch.device("cpu")}
        made = func(*args, **{**kwargs, "device": torch.device("meta")})
        if sum(tensor.numel() for tensor in _tensors(made)) < SMALL:
            return func(*args, **real)
        self._note(func, args, real, made)
        return made

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for tensor in _written(func, args, kwargs):
            if not tensor.is_meta:
                raise CannotDefer(f"{func} reads a large tensor")
        if any(not tensor.is_meta and tensor.numel() >= SMALL for tensor in _tensors((args, kwargs))):
            raise CannotDefer(f"{func} takes numbers from a large tensor that is there already")
        made = func(*_on_meta(args), **_on_meta(kwargs))
        if any(not tensor.is_meta for tensor in _tensors(made)):
            raise CannotDefer(f"{func} reads a large tensor")
        self._note(func, args, kwargs, made)
        return made

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any) -> None:
        read = frozenset(_key(tensor) for tensor in _tensors((args, kwargs)) if tensor.is_meta)
        new = [tensor for tensor in _tensors(made) if _key(tensor) not in read]
        written = frozenset(_key(tensor) for tensor in [*_written(func, args, kwargs), *new])
        if not written:
            return  # a view
        state = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            if kwargs.get("generator") is not None:
                raise CannotDefer(f"{func} draws from a generator of its own")
            state = torch.get_rng_state()
            func(*_zeros(args), **_zeros(kwargs))  # random numbers move on
        args, kwargs = tree_map(_kept, args), tree_map(_kept, kwargs)
        aliases = [_kept(tensor) for tensor in _tensors(made)]
        self._calls.append(_Call(func, args, kwargs, written, read, aliases, state))

    def _check(self, module: nn.Module) -> None:
        """Every large tensor that is left is a parameter or a buffer, and has its numbers to itself."""
        held = [tensor for tensor in [*module.parameters(), *module.buffers()] if tensor.is_meta]
        kinds = (torch.Tensor, nn.Parameter)
        if any(type(tensor) not in kinds for tensor in held) or len({_key(t) for t in held}) < len(held):
            raise CannotDefer("its parameters are of a kind of their own, or views of one another")
        ours = {key for call in self._calls for key in call.written}
        if any(_key(tensor) not in ours for tensor in held):
            raise CannotDefer("it has parameters on the meta device")
        known = {id(tensor) for tensor in held}
        known |= {
            id(tensor) for call in self._calls for tensor in _tensors((call.args, call.kwargs, call.made))
        }
        gc.collect()
        for one in gc.get_objects():
            if (
                issubclass(type(one), torch.Tensor)
                and id(one) not in known
                and one.is_meta
                and _key(one) in ours
            ):
                raise CannotDefer("it keeps a large tensor that is neither a parameter nor a buffer")

    # ---- doing it again

    def _replay(self, tensor: torch.Tensor) -> torch.Tensor:
        wanted, calls = {_key(tensor)}, []
        for call in reversed(self._calls):
            if call.written & wanted:
                calls.append(call)
                wanted |= call.read
        storages: dict[int, torch.UntypedStorage] = {}

        def real(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not value.is_meta:
                return value
            place = value.storage_offset(), value.size(), value.stride()
            return torch.empty(0, dtype=value.dtype).set_(storages[_key(value)], *place)

        for call in reversed(calls):
            if call.random_state is not None:
                torch.set_rng_state(call.random_state)
            made = call.func(*tree_map(real, call.args), **tree_map(real, call.kwargs))
            for there, alias in zip(_tensors(made), call.made, strict=True):
                if there.stride() != alias.stride():
                    raise CannotDefer(f"{call.func} lays its result out otherwise")
                storages.setdefault(_key(alias), there.untyped_storage())
        found: torch.Tensor = real(tensor.detach())
        return found


class _Unasked(TorchFunctionMode):
    """Nobody asks where a tensor is: an initialisation that leaves out tensors on the meta device would make others
    than it would make on the host."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _PLACES and args[0].is_meta:
            raise CannotDefer("its constructor asks where a tensor is")
        return func(*args, **(kwargs or {}))


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _kept(value: Any) -> Any:
    """For the record: an alias of a large tensor, a copy of a small one, which may change."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach() if value.is_meta else value.detach().clone()


def _on_meta(tree: Any) -> Any:
    return tree_map(lambda one: one.to("meta") if isinstance(one, torch.Tensor) else one, tree)


def _zeros(tree: Any) -> Any:
    def zeros(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype).zero_()

    return tree_map(zeros, tree)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[torch.Tensor]:
    """The tensors among the arguments that `func` changes."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors(args[number] if number < len(args) else kwargs.get(argument.name))
