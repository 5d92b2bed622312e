"""Whether replicas that must agree do: what they hold is compared by fingerprints.

Invariants: every rank comes to the same comparisons, at steps that counts alone decide, at every validation and before
every checkpoint, and reaches the same verdict. Where nothing has parted, a rank sends a few bytes for each tensor. Sums
that other processors round otherwise are told, and end nothing. An optimizer's state is compared, too, unless ranks
hold other state at the first comparison that has any: then it is each rank's own, or sharded.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from mpitrain.errors import ReplicasPartedError, WireError
from mpitrain.model.in_place import COLUMNS, WAY_OUT, Rarely, fingerprints
from mpitrain.strategies.base import Strategy

if TYPE_CHECKING:
    from mpitrain.system.launched.ranks import Ranks

ROUNDING = 1e-6  # of a tensor's length
MOST_STEPS = 100  # from one comparison to the next
LARGE = 1e30  # in place of what is not finite

Named = list[tuple[str, torch.Tensor]]
Ranked = list[tuple[int, list[int], list[int]]]  # ranks with what they hold, and of the optimizer's state


class _Parted(NamedTuple):
    """Two ranks of a part hold another tensor of this number; `of_state`: of the optimizer's."""

    part: Any
    number: int
    rank: int
    other: int
    of_state: bool


class ReplicaGuard:
    """Compares what ranks hold.

    Args:
        runtime: of all ranks; strategy: under which they train.
        held: this rank's tensors by name, which those with the same `part` hold, too.
        tell: told on rank 0 of what differs by rounding, once.
        changed: parameters that this rank's forward passes have changed in place, as far as is known.
        state: the same of the optimizer, as `state_of` names it.
        most_steps: from one comparison to the next.
        damaged: payloads that this rank has received and whose checksums were wrong, as (sender, step), since it was
            asked last.

    Attributes:
        agreed_at: steps that had been taken when all last held the same.
        takes_rounding: whether a difference by rounding is told and ends nothing.
    """

    def __init__(
        self,
        runtime: Ranks,
        strategy: Strategy,
        held: Callable[[], Named],
        tell: Callable[..., None] | None = None,
        changed: Callable[[], Collection[str]] = tuple,
        part: Hashable = 0,
        state: Callable[[], Named] = list,
        most_steps: int | None = None,
        damaged: Callable[[], list[tuple[int, int]]] | None = None,
    ):
        self.runtime, self.strategy, self.part = runtime, strategy, part
        self._held, self._changed, self._state, self._damaged = held, changed, state, damaged or list
        self._most_steps = most_steps or MOST_STEPS
        self._tell = tell if runtime.rank == 0 else None
        self._has_state: bool | None = None  # until it is known whether all hold the same state
        self.takes_rounding = True
        self.begin_at(max(0, runtime.step + 1))

    def begin_at(self, step: int) -> None:
        """All hold the same now, after so many steps: compare often at first, as at the beginning."""
        self.agreed_at, self._due = step, Rarely(self._most_steps)

    def after_step(self) -> bool:
        """Compare, if it is time to; every rank calls it after every step at which all hold the same. Returns whether
        it was; errors as of `compare`."""
        return self._due() and self.compare()

    def compare(self) -> bool:
        """Collective. Returns whether there was anything to compare.

        Raises:
            ReplicasPartedError: the ranks hold different numbers; on all ranks.
            WireError: a payload was damaged on its way since the last comparison; on all ranks.
        """
        runtime = self.runtime
        if runtime.size == 1:
            return True
        named = self._held(), [] if self._has_state is False else self._state()
        prints = [fingerprints([tensor for _, tensor in some]).tolist() for some in named]
        everybody = runtime.allgather([self.part, *prints, self._damaged()])
        self._judge_payloads([damaged for *_, damaged in everybody])
        parts: dict[Any, Ranked] = {}
        for rank, (part, held, state, _) in enumerate(everybody):
            parts.setdefault(part, []).append((rank, held, state))
        found = _first_difference(parts, of_state=False)
        if found is None and self._has_state is None and any(state for *_, state, _ in everybody):
            self._has_state = not any(_differ(ranks) for ranks in parts.values())
        if found is None and self._has_state:
            found = _first_difference(parts, of_state=True)
        if found is not None:
            self._judge(found)
        self.agreed_at = runtime.step + 1
        return True

    def _judge_payloads(self, damaged: Iterable[list[list[int]]]) -> None:
        rows = [(receiver, *row) for receiver, some in enumerate(damaged) for row in some]
        if not rows:
            return
        receiver, sender, step = rows[0]
        more = f"; so were {len(rows) - 1} others" if len(rows) > 1 else ""
        raise WireError(
            f"{self.strategy}: in step {step + 1} a payload from rank {self._named(sender)} to rank "
            f"{self._named(receiver)} was damaged on its way: its checksum is wrong{more}"
        )

    def _named(self, rank: int) -> str:
        host = self.runtime.hosts[rank]
        return f"{rank} ({host})" if host else str(rank)

    def _judge(self, parted: _Parted) -> None:
        runtime, (part, index, rank, other, of_state) = self.runtime, parted
        sketches = runtime.allgather(self._sketch(index, of_state) if part == self.part else None)
        name, length, own, changed = sketches[rank]
        of_other = torch.tensor(sketches[other][2])
        distance = float((torch.tensor(own) - of_other).norm()) / (sketches[other][1] or length or 1.0)
        if distance <= ROUNDING and self.takes_rounding:
            tell, self._tell = self._tell, None
            if tell is not None:
                tell("replicas differ by rounding", tensor=name, ranks=[other, rank], distance=distance)
            return
        step, why = runtime.step + 1, ""
        if changed:
            why = f", and the forward pass or the loss changes {changed!r} in place: {WAY_OUT}"
        else:
            why = (
                ": a parameter must be changed by its optimizer alone, by gradients of the loss that is returned, and "
                "what a forward pass changes must not depend on the batch; torch.distributed.all_reduce in it makes a "
                "buffer the mean of all; else a bit of memory has flipped"
            )
        hosts = f"{runtime.hosts[rank]} and {runtime.hosts[other]}" if runtime.hosts[rank] else ""
        error = ReplicasPartedError(
            f"{self.strategy}: after step {step}, {name!r} of rank {rank} is no longer that of rank {other} "
            f"(apart by {distance:.2g} of its length; {f'hosts {hosts}; ' if hosts else ''}they last agreed after step "
            f"{self.agreed_at}), though all must hold the same{why}"
        )
        error.by_rounding = distance <= ROUNDING
        raise error

    @torch.no_grad()
    def _sketch(self, index: int, of_state: bool) -> list[Any]:
        """(name, length, sums of columns, a parameter that is changed in place) of one tensor."""
        named = self._state() if of_state else self._held()
        if index >= len(named):
            return ["the optimizer's state", 0.0, [0.0] * COLUMNS, ""]
        name, tensor = named[index]
        flat = tensor.detach().reshape(-1)
        flat = (torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat).to("cpu", torch.float64)
        flat = torch.cat([flat, flat.new_zeros(-flat.numel() % COLUMNS)]).nan_to_num(LARGE, LARGE, -LARGE)
        changed = next(iter(self._changed()), "")
        return [name, float(flat.norm()), flat.view(-1, COLUMNS).sum(0).tolist(), changed]


def _differ(ranks: Ranked) -> bool:
    """Whether ranks of one part hold other state."""
    return any(state != ranks[0][2] for *_, state in ranks)


def _first_difference(parts: dict[Any, Ranked], of_state: bool) -> _Parted | None:
    """What the ranks of a part hold different ones of: a rank that differs from most of them, and one of those."""
    for part, ranks in parts.items():
        rows = [state if of_state else held for _, held, state in ranks]
        # some ranks may have more of an optimizer's state
        for number, values in enumerate(itertools.zip_longest(*rows)):
            if len(set(values)) > 1:
                usual = Counter(values).most_common(1)[0][0]  # of two the first rank's
                odd = next(place for place, value in enumerate(values) if value != usual)
                return _Parted(part, number, ranks[odd][0], ranks[values.index(usual)][0], of_state)
    return None


def state_of(optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, torch.Tensor]]) -> Named:
    """The tensors of an optimizer's state, as "momentum_buffer of 0.weight"."""
    names = {id(parameter): name for name, parameter in named}
    found = []
    for number, parameter in enumerate(one for group in optimizer.param_groups for one in group["params"]):
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            if isinstance(value, torch.Tensor):
                found.append((f"{key} of {names.get(id(parameter), f'parameter {number}')}", value))
    return found
