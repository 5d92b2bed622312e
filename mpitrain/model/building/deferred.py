"""Building a module without its large tensors, and making them later, one after another, with the values that the
constructor would have given them.

Invariants: what is made later is the same bits, and random numbers move on as if it had been made at once. The
constructor runs once. While it does, large tensors are on the meta device and hold nothing: the operations on them are
recorded, with the state of the random numbers where they draw some, and run again for one tensor when that one is asked
for. A constructor sees no difference in its own thread (what another thread writes to large tensors is lost): a tensor
says that it is on the host, and a single number that is read is computed. Tensors whose numbers are needed otherwise
while the module is built (NumPy, weights that are loaded, tensors outside of parameters and buffers) become real in
place, and stay so. A tensor keeps its identity when it becomes real.
"""

from __future__ import annotations

import bisect
import contextlib
import gc
import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from mpitrain import torch_versions
from mpitrain.devices.moving import put

tree_leaves, tree_map = torch_versions.pytree.tree_leaves, torch_versions.pytree.tree_map
schema_of = torch_versions.schema_of
SMALL = 1024  # numbers; tensors with fewer are made at once

_T: Any = torch.Tensor
_HOST, _NOWHERE = torch.device("cpu"), torch.device("meta")
_PLACES: dict[Any, Any] = {
    _T.is_meta.__get__: False, _T.is_cpu.__get__: True, _T.device.__get__: _HOST, _T.get_device: -1,
}  # fmt: skip
# These return something that is no tensor, and leave no way to the numbers.
_READINGS = {
    _T.item, _T.tolist, _T.__bool__, _T.__int__, _T.__float__, _T.__complex__, _T.__index__, _T.__repr__,
    _T.__format__, torch.equal, _T.equal, torch.allclose, _T.allclose,
}  # fmt: skip
# These return what shares memory with a tensor, or serialises it.
_EXPOSURES = {
    _T.numpy, _T.__array__, _T.data_ptr, _T.untyped_storage, _T.storage, torch_versions.typed_storage(), _T.__dlpack__,
    _T.share_memory_, _T.pin_memory, _T.__reduce_ex__,
}  # fmt: skip
# They draw as many numbers whatever their arguments hold.
_DRAW_BY_SHAPE = {
    "normal_", "uniform_", "exponential_", "cauchy_", "log_normal_", "geometric_", "random_", "rand_like",
    "randn_like", "randint_like",
}  # fmt: skip
# They draw what these do.
_AS_FILLED: dict[str, Any] = {
    "randn": _T.normal_, "randn_like": _T.normal_, "rand": _T.uniform_, "rand_like": _T.uniform_
}  # fmt: skip


class CannotDefer(Exception):
    """The constructor does something that cannot be recorded."""


class _CannotRetry(CannotDefer):
    """Nor can it be done with real tensors instead, for a part of it has been done."""


@dataclass(frozen=True)
class _View:
    """Where a tensor lies in a storage that is still to be made."""

    key: int
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


@dataclass(frozen=True)
class _Call:
    """One recorded operation; its tensors are views, or copies of small ones."""

    func: Any
    args: Any
    kwargs: dict[str, Any]
    written: frozenset[int]
    read: frozenset[int]
    made: list[_View]
    random_state: torch.Tensor | None
    default_dtype: torch.dtype


class Deferred:
    """What a constructor does to large tensors, and the tensors that are still to be made.

    Attributes:
        built_at_once: why large parameters or buffers are real already, if any are.
    """

    def __init__(self) -> None:
        self.built_at_once = ""
        self._calls: list[_Call] = []
        self._writers: dict[int, list[int]] = {}  # numbers of the calls that write to a storage
        self._storages: dict[int, torch.UntypedStorage] = {}  # empty; while they live, no other has their key
        self._holders: dict[int, list[torch.Tensor]] = {}
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._num_written, self._failed = 0, ""
        self._paused, self._within = False, False  # within a function that takes what is still to be made

    def build(self, make: Callable[[], nn.Module]) -> nn.Module:
        """What `make` returns, its large parameters and buffers on the meta device.

        Raises:
            CannotDefer: it cannot be built so. Whatever else `make` raises may be for the same reason.
        """
        own = not _others_have_frozen()
        if own:
            gc.freeze()  # older objects hold no tensor of this module, and need not be looked through
        try:
            with _Operations(self), _Functions(self):
                module = make()
            if self._failed:
                raise CannotDefer(self._failed)
            if isinstance(module, nn.Module):
                self._settle(module)
        finally:
            self._scratch = torch.empty(0, dtype=torch.uint8)
            if own:
                gc.unfreeze()
        return module

    def make_leftovers(self) -> None:
        """After `build` has failed: make what has outlived the constructor, such as a tensor in a cache of the user's
        that the next constructor will find there."""
        gc.collect()
        self._make_real([one for one in _alive() if self.holds(one) and one.grad_fn is None], "")

    def holds(self, tensor: Any) -> bool:
        """Whether this tensor is still to be made."""
        return type(tensor).__torch_dispatch__ is _PLAIN and tensor.is_meta and _key(tensor) in self._storages

    def fill(self, tensors: Iterable[torch.Tensor], device: torch.device = _HOST) -> None:
        """Make those that are still to be made, on this device; random numbers stand still."""
        for tensor in tensors:
            if self.holds(tensor):
                key = _key(tensor)
                made = self.made(tensor, device)
                holders = self._holders.pop(key, [tensor])
                for holder in holders:
                    one = made if len(holders) == 1 else made.as_strided(*_place(holder))
                    _become(holder, one)

    def move(self, module: nn.Module, device: torch.device) -> None:
        """As `module.to(device)`, without what is still to be made."""
        for tensor in held_by(module):
            if not self.holds(tensor) and tensor.device != device:
                put(tensor, device)

    def made(self, tensor: torch.Tensor, device: torch.device = _HOST) -> torch.Tensor:
        """A tensor with the values of one that is still to be made, which stays so."""
        key, states = _key(tensor), torch.get_rng_state()
        try:
            with self._pause(), torch.no_grad():
                storage = self._replay({key})[key]
                if len(self._holders.get(key, ())) > 1:
                    whole = torch.empty(0, dtype=tensor.dtype).set_(storage)
                    return whole.to(device).as_strided(*_place(tensor))
                found: torch.Tensor = _real(_view(tensor), {key: storage})
                return (found if storage.nbytes() == found.nbytes else found.clone()).to(device)
        finally:
            torch.set_rng_state(states)

    # ---- while the module is built

    def function(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """A function of torch's that the constructor calls."""
        ours = [tensor for tensor in _tensors((args, kwargs)) if self.holds(tensor)]
        if not ours or self._paused:
            return func(*args, **kwargs)
        if func in _PLACES:
            return _PLACES[func]
        if func in _READINGS:
            with self._pause():
                values = {id(tensor): self.made(tensor) for tensor in ours}
                args, kwargs = tree_map(lambda one: values.get(id(one), one), (args, kwargs))
                return func(*args, **kwargs)
        if func in (_T.to, _T.cpu):  # which copies only where it has to
            args, kwargs = (args[:1], {}) if func is _T.cpu else (args, kwargs)
            args, kwargs = (args[0], *tree_map(_nowhere, args[1:])), tree_map(_nowhere, kwargs)
            func = _T.to
            if len(args) == 1 and not kwargs:
                return args[0]
        if func in _EXPOSURES:
            self._make_real(ours, f"its constructor asks for the memory of a tensor ({func.__name__})")
            return func(*args, **kwargs)
        num_calls, num_written, state = len(self._calls), self._num_written, torch.get_rng_state()
        try:
            self._within = True
            return func(*args, **kwargs)
        except _CannotRetry:
            raise
        except CannotDefer as error:
            if self._num_written > num_written:
                self._failed = str(error)
                raise _CannotRetry(self._failed) from error
            for call in reversed(self._calls[num_calls:]):
                if call.random_state is not None and call.kwargs.get("generator") is not None:
                    call.kwargs["generator"].set_state(call.random_state)
            while len(self._calls) > num_calls:
                for key in self._calls.pop().written:
                    self._writers[key].pop()
            torch.set_rng_state(state)
            self._make_real(ours, str(error))
            return func(*args, **kwargs)
        finally:
            self._within = False

    def operation(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """One of torch's operations, of which its functions consist."""
        if self._paused:
            return func(*args, **kwargs)
        with torch_versions.DisableTorchFunction():
            given = list(_tensors((args, kwargs)))
            beside = self._within and kwargs.get("device") == _NOWHERE  # torch's own, beside one of ours
            if beside or any(self.holds(tensor) for tensor in given):
                return self._record(func, args, kwargs)
            named = {argument.name for argument in schema_of(func).arguments}
            if given or "device" not in named or torch.device(kwargs.get("device") or _HOST) != _HOST:
                self._num_written += any(True for _ in _written(func, args, kwargs))
                return func(*args, **kwargs)
            made = func(*args, **_on_meta({**kwargs, "device": _HOST}))
            if sum(tensor.numel() for tensor in _tensors(made)) < SMALL or not _is_dense(made):
                return func(*args, **kwargs)
            self._note(func, args, {**kwargs, "device": _HOST}, made)
            return made

    def _record(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        for tensor in _tensors((args, kwargs)):
            if not self.holds(tensor) and (tensor.is_meta or tensor.numel() >= SMALL):
                raise CannotDefer(f"its constructor takes numbers from a large tensor that is there ({func})")
        if any(not self.holds(tensor) for tensor in _written(func, args, kwargs)):
            raise CannotDefer(f"its constructor writes numbers of a large tensor into another ({func})")
        if kwargs.get("device") not in (None, _HOST, _NOWHERE):
            raise CannotDefer(f"its constructor moves a tensor to {kwargs['device']}")
        before = [(tensor, _key(tensor)) for tensor in _tensors((args, kwargs)) if self.holds(tensor)]
        try:
            made = func(*tree_map(_to_meta, args), **_on_meta(kwargs))
        except (RuntimeError, NotImplementedError) as error:
            raise CannotDefer(str(error).partition("\n")[0]) from error
        new = [tensor for tensor in _tensors(made) if _key(tensor) not in {key for _, key in before}]
        alone = len({_key(tensor) for tensor in new}) == len(new) and not any(
            one.storage_offset() for one in new
        )
        if any(_key(tensor) != key for tensor, key in before) or not _is_dense(made) or not alone:
            self._failed = f"its constructor gives a tensor other memory ({func})"
            raise _CannotRetry(self._failed)
        self._note(func, args, {**kwargs, "device": _HOST} if kwargs.get("device") else kwargs, made)
        return made

    def _note(self, func: Any, args: Any, kwargs: dict[str, Any], made: Any) -> None:
        used = {id(tensor): _key(tensor) for tensor in _tensors((args, kwargs)) if tensor.is_meta}
        changed = {id(tensor) for tensor in _written(func, args, kwargs)}
        new = [tensor for tensor in _tensors(made) if _key(tensor) not in used.values()]
        written = frozenset([*(used[one] for one in changed), *map(_key, new)])
        if not written:
            return  # a view
        state, generator = None, kwargs.get("generator")
        if torch.Tag.nondeterministic_seeded in func.tags:
            name = schema_of(func).name.partition("::")[2]
            by_shape = name in _DRAW_BY_SHAPE or schema_of(func).overload_name == "float"  # bernoulli_
            if not by_shape and used.keys() - changed:
                raise CannotDefer(f"its constructor draws by the numbers of a large tensor ({func})")
            state = torch.get_rng_state() if generator is None else generator.get_state()
            self._draw(func, args, kwargs, made)
        for tensor in new:
            self._storages[_key(tensor)] = tensor.untyped_storage()
        for key in written:
            self._writers.setdefault(key, []).append(len(self._calls))
        self._calls.append(
            _Call(
                func, tree_map(_kept, args), tree_map(_kept, kwargs), written, frozenset(used.values()),
                [_view(tensor) for tensor in _tensors(made)], state, torch.get_default_dtype(),
            )
        )  # fmt: skip

    def _draw(self, func: Any, args: Any, kwargs: dict[str, Any], made: object) -> None:
        """Random numbers move on. What is drawn goes into memory that is used again: the gaps that large tensors leave
        would be filled with small ones, and not be given back."""

        def scratch(value: object) -> Any:
            if not isinstance(value, torch.Tensor) or not value.is_meta:
                return value
            num_bytes = value.untyped_storage().nbytes()
            if self._scratch.nbytes < num_bytes:
                self._scratch = torch.empty(num_bytes, dtype=torch.uint8)
            whole = torch.empty(0, dtype=value.dtype).set_(self._scratch.untyped_storage())
            return whole.as_strided(*_place(value))

        name = schema_of(func).name.partition("::")[2]
        if name in _AS_FILLED:
            _AS_FILLED[name](scratch(made), generator=kwargs.get("generator"))
        else:
            func(*tree_map(scratch, args), **tree_map(scratch, kwargs))

    def _make_real(self, tensors: Iterable[torch.Tensor], why: str) -> None:
        """In place, with all that share their memory."""
        self.built_at_once = self.built_at_once or why
        keys = {_key(tensor) for tensor in tensors}
        state = torch.get_rng_state()
        try:
            with self._pause(), torch.no_grad():
                storages = self._replay(keys)
                for one in _alive():
                    if self.holds(one) and _key(one) in keys:
                        if one.grad_fn is not None:
                            self._failed = f"{why}, of a tensor that has a gradient function"
                            raise _CannotRetry(self._failed)
                        _become(one, _real(_view(one), storages))
        finally:
            torch.set_rng_state(state)

    def _settle(self, module: nn.Module) -> None:
        """The module is built: what is no parameter and no buffer of it becomes real."""
        held = [tensor for tensor in held_by(module) if self.holds(tensor)]
        for tensor in held:
            self._holders.setdefault(_key(tensor), []).append(tensor)
            kinds = {one.dtype for one in self._holders[_key(tensor)]}
            if tensor.grad_fn is not None or len(kinds) > 1:
                raise CannotDefer("its parameters or buffers have gradient functions, or share numbers")
        gc.collect()
        ours = {id(one) for tensor in held for one in (tensor, tensor._base)}
        others = [one for one in _alive() if self.holds(one) and id(one) not in ours]
        if others:
            self._make_real(others, "it keeps tensors that are neither parameters nor buffers")
            self._holders = {key: some for key, some in self._holders.items() if self.holds(some[0])}
        large = any(one.numel() >= SMALL and not self.holds(one) for one in [*held_by(module), *others])
        elsewhere = "its constructor takes numbers from elsewhere, such as a file"
        self.built_at_once = (self.built_at_once or elsewhere) if large else ""

    @contextlib.contextmanager
    def _pause(self) -> Iterator[None]:
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    # ---- doing it again

    def _replay(self, keys: Iterable[int]) -> dict[int, torch.UntypedStorage]:
        """The storages of these keys, made; others that were needed on the way are let go as soon as can be."""
        asked = frozenset(keys)
        needed = {number for key in asked for number in self._writers.get(key, ())}
        left = [-number for number in needed]
        heapq.heapify(left)
        while left:  # the last call first
            number = -heapq.heappop(left)
            for key in self._calls[number].read:
                earlier = self._writers[key][: bisect.bisect_left(self._writers[key], number)]
                for one in (one for one in earlier if one not in needed):
                    heapq.heappush(left, -one)
                needed.update(earlier)
        calls = [self._calls[number] for number in sorted(needed)]
        last_use = {key: call for call in calls for key in call.read | call.written}
        storages: dict[int, torch.UntypedStorage] = {}
        for call in calls:
            self._do(call, storages)
            for key in call.read | call.written:
                if last_use[key] is call and key not in asked:
                    storages.pop(key, None)
        return storages

    def _do(self, call: _Call, storages: dict[int, torch.UntypedStorage]) -> None:
        args, kwargs = tree_map(lambda one: _real(one, storages), (call.args, call.kwargs))
        if call.random_state is not None:
            if kwargs.get("generator") is not None:
                kwargs["generator"] = torch.Generator()
                kwargs["generator"].set_state(call.random_state)
            else:
                torch.set_rng_state(call.random_state)
        before = torch.get_default_dtype()
        torch.set_default_dtype(call.default_dtype)  # what decides, where a call names no dtype
        try:
            made = call.func(*args, **kwargs)
        finally:
            torch.set_default_dtype(before)
        for there, view in zip(_tensors(made), call.made, strict=True):
            if view.key in storages:
                continue
            assert there.dtype == view.dtype, (call.func, there.dtype, view.dtype)
            if there.stride() != view.stride:
                laid_out = torch.empty_strided(view.size, view.stride, dtype=view.dtype)
                there = laid_out.copy_(there)
            storages[view.key] = there.untyped_storage()


class _Operations(torch_versions.TorchDispatchMode):
    def __init__(self, deferred: Deferred):
        super().__init__()
        self._deferred = deferred

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        return self._deferred.operation(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    def __init__(self, deferred: Deferred):
        super().__init__()
        self._deferred = deferred

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        return self._deferred.function(func, args, kwargs or {})


_PLAIN = torch.Tensor.__torch_dispatch__


def held_by(module: nn.Module) -> list[torch.Tensor]:
    """Its parameters and buffers, each once."""
    return [*module.parameters(), *module.buffers()]


_frozen_by_others = False


def _others_have_frozen() -> bool:
    """Whether to thaw would undo what others have frozen. Python counts by a walk through all of it, so once it has
    found something it is not asked again."""
    global _frozen_by_others
    _frozen_by_others = _frozen_by_others or gc.get_freeze_count() > 0
    return _frozen_by_others


def _alive() -> Iterator[torch.Tensor]:
    return (one for one in gc.get_objects() if issubclass(type(one), torch.Tensor))


def _become(tensor: torch.Tensor, real: torch.Tensor) -> None:
    real.requires_grad_(tensor.requires_grad)
    torch_versions.swap_tensors(tensor, real)


def _tensors(tree: object) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _is_dense(tree: object) -> bool:
    return all(one.layout == torch.strided and one.is_meta for one in _tensors(tree))


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _place(tensor: torch.Tensor) -> tuple[torch.Size, tuple[int, ...], int]:
    return tensor.size(), tensor.stride(), int(tensor.storage_offset())


def _view(tensor: torch.Tensor) -> _View:
    size, stride, offset = _place(tensor)
    return _View(_key(tensor), tensor.dtype, offset, size, stride)


def _kept(value: object) -> Any:
    """For the record: where a large tensor lies, and a copy of a small one, which may change."""
    if not isinstance(value, torch.Tensor):
        return value
    return _view(value) if value.is_meta else value.detach().clone()


def _real(value: object, storages: dict[int, torch.UntypedStorage]) -> Any:
    if not isinstance(value, _View):
        return value
    tensor = torch.empty(0, dtype=value.dtype)
    return tensor.set_(storages[value.key], value.offset, value.size, value.stride)


def _to_meta(value: object) -> Any:
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def _nowhere(value: object) -> Any:
    """A device, or a tensor there, that stands for the host."""
    if isinstance(value, torch.Tensor):
        return value.to(_NOWHERE) if value.device == _HOST else value
    return _NOWHERE if isinstance(value, torch.device | str) and torch.device(value) == _HOST else value


def _on_meta(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The same arguments for tensors that hold nothing."""
    found = {name: tree_map(_to_meta, value) for name, value in kwargs.items() if name != "generator"}
    return {**found, "device": _NOWHERE} if kwargs.get("device") is not None else found


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors among the arguments that `func` changes."""
    for number, argument in enumerate(schema_of(func).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors(args[number] if number < len(args) else kwargs.get(argument.name))
