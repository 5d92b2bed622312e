"""What a rank of each kind holds in memory, by part, before anything runs, and whether a node has so much.

Invariants: sizes are those of the model's tensors and of the buffers that roles keep for them. Measured, in this
process, are only what Python and the libraries take, and the optimizer's state after a step with gradients of zero.
What the backward pass keeps of a batch is not counted here: `mpitrain plan` measures it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from mpitrain.codecs.base import Codec
from mpitrain.model.building.compiler_import import without_compiler
from mpitrain.model.optimizers.optimizer import is_torchs_elementwise, rebuild, state_bytes
from mpitrain.model.optimizers.step_hooks import OwnStep, without_global_hooks
from mpitrain.model.wire.buffers import wire_dtype
from mpitrain.model.wire.masters import SIXTEEN, keeps_masters
from mpitrain.roles.server.gathering import WAITING_BYTES, num_waiting
from mpitrain.strategies.allreduce import AllReduce
from mpitrain.strategies.base import ServerStrategy, Strategy
from mpitrain.strategies.decentralized import Decentralized
from mpitrain.strategies.local_sgd import Average, LocalSGD
from mpitrain.strategies.placement import Roles
from mpitrain.system.memory import available_bytes, resident_bytes
from mpitrain.system.saying import tell
from mpitrain.system.sizes import counted, size_text
from mpitrain.training.session import Session

_SAMPLE, _WIDTH = 4096, 80
_STATE = ("parameters", "optimizer")  # of a rank that steps the whole model
_LIBRARIES_BYTES = 100 << 20  # of MPI, and of what torch imports with the first step: not here in a dry run


class Sizes(NamedTuple):
    """Bytes of a model: of its parameters, of those that are trained, of these as they are stepped (masters in 32 bits)
    and of the largest of these, of the optimizer's state (None: not known), and of what a step of the optimizer makes
    and drops."""

    parameters: int
    trained: int
    stepped: int
    largest: int
    optimizer: int | None
    step: int

    @property
    def masters(self) -> int:
        """Of masters beside the model; of each, and of its gradient in 32 bits, where they are stepped."""
        return self.stepped if self.stepped > self.trained else 0


class Need(NamedTuple):
    """Of one kind of rank; `parts`: bytes by name; `in_checkpoints`: of those that it copies while one is written."""

    role: str
    parts: dict[str, float]
    in_checkpoints: tuple[str, ...] = ()

    @property
    def who(self) -> str:
        """In a line."""
        return f"each {self.role}"

    @property
    def num_bytes(self) -> float:
        """All of it, but for a checkpoint's copy."""
        return sum(self.parts.values())

    @property
    def checkpoint_bytes(self) -> float:
        """More, while a checkpoint is written, unless training pauses."""
        return sum(self.parts[name] for name in self.in_checkpoints)


class Messages(NamedTuple):
    """How many workers there are, and bytes of a message from one of them, and to one, over all shards; `num_behind`:
    workers that send through an aggregator, where there are any."""

    num_workers: int
    push: float = 0.0
    reply: float = 0.0
    num_behind: int = 0


def sizes_of(module: nn.Module, optimizer: Optimizer, strategy: Strategy, may_step: bool = True) -> Sizes:
    """Of a module that is built here; `may_step`: with this optimizer, where its state cannot be known otherwise."""
    trained = [one for one in module.parameters() if one.requires_grad]
    dtypes = [_stepped(one.dtype, strategy) for one in trained]
    stepped = [one.numel() * dtype.itemsize for one, dtype in zip(trained, dtypes, strict=True)]
    largest = max(stepped, default=0)
    made = min(largest, OwnStep(optimizer).makes_at_most)
    return Sizes(
        parameters=sum(one.nbytes for one in module.parameters()),
        trained=sum(one.nbytes for one in trained),
        stepped=sum(stepped),
        largest=largest,
        optimizer=_state_bytes(trained, optimizer, strategy, may_step),
        step=0 if isinstance(optimizer, torch.optim.SGD) else int(2 * made),
    )


def _stepped(dtype: torch.dtype, strategy: Strategy) -> torch.dtype:
    return torch.float32 if dtype in SIXTEEN and keeps_masters(strategy) else dtype


def _state_bytes(
    trained: Sequence[nn.Parameter], optimizer: Optimizer, strategy: Strategy, may_step: bool
) -> int | None:
    """Of torch's optimizers that look at one element at a time by a small tensor, so that no step of a large model is
    taken for it. A step of the user's own may do anything, and is taken only if it may be."""
    if not (trained and is_torchs_elementwise(optimizer)):
        return state_bytes(trained, optimizer) if may_step else None
    sample = nn.Parameter(torch.zeros(_SAMPLE, dtype=_stepped(trained[0].dtype, strategy)))
    with without_global_hooks(), without_compiler():
        each = state_bytes([sample], rebuild(optimizer, [(0, sample)]))
    return None if each is None else each // _SAMPLE * sum(one.numel() for one in trained)


def memory_needs(strategy: Strategy, sizes: Sizes, messages: Messages) -> list[Need]:
    """Of each kind of rank, those with the most parts first. Not of split models, whose ranks hold parts."""
    return strategy.choose(_NEEDS)(strategy, sizes, messages)


def tell_memory(session: Session, module: nn.Module, optimizer: Optimizer) -> None:
    """Report what ranks need where they compute on the host, on rank 0, and warn on each node that has less; the module
    is built, and nothing else. Nothing where the strategy's needs are not known."""
    runtime, strategy = session.runtime, session.strategy
    is_asked = runtime.rank == 0 or runtime.local_rank == 0
    is_known = not strategy.splits_model and not strategy.reduces and runtime.num_threads is None
    if not is_asked or session.device.type != "cpu" or not is_known:
        return
    sizes = sizes_of(module, optimizer, strategy, may_step=False)
    if sizes.optimizer is None:
        return
    needs = memory_needs(strategy, sizes, dense_messages(strategy, module, session.roles))
    libraries = max(0, resident_bytes() - sizes.parameters)
    if runtime.rank == 0:
        told = {need.who: size_text(libraries + need.num_bytes) for need in needs}
        copied = max(0 if session.overrides.checkpoint_pause else need.checkpoint_bytes for need in needs)
        session.report.event(
            "memory",
            **told,
            checkpoint_copy=size_text(copied),
            not_counted="what the backward pass keeps of a batch",
        )
    more = {need.role: need.num_bytes - sizes.parameters for need in needs}
    ranks = [rank for rank, node in enumerate(runtime.nodes) if node == runtime.nodes[runtime.rank]]
    needed = sum(more.get(session.roles.of(rank), more["worker"]) for rank in ranks)
    left = available_bytes(len(ranks)) * len(ranks)
    if needed > left:
        tell(
            f"mpitrain: warning: {runtime.hosts[runtime.rank]}: its {counted(len(ranks), 'rank')} will need "
            f"{size_text(needed)} more than they have, and {size_text(left)} can be had: take fewer ranks a node, more "
            "servers, or a strategy that splits the model"
        )


def dense_messages(strategy: Strategy, module: nn.Module, roles: Roles) -> Messages:
    """In the strategy's wires, and as if no codec made messages smaller: what a rank makes room for."""
    num_workers, num_behind = len(roles.workers), max(map(len, roles.members), default=0)
    if not strategy.sends_messages:
        return Messages(num_workers)
    trained = [one for one in module.parameters() if one.requires_grad]
    numbers, dtypes = sum(one.numel() for one in trained), {one.dtype for one in trained}
    travels = dtypes.pop() if len(dtypes) == 1 else torch.float32
    wires = (
        (strategy.push_numbers, strategy.reply_numbers)
        if isinstance(strategy, ServerStrategy)
        else ("full",) * 2
    )
    push, reply = (float(numbers * wire_dtype(wire, travels).itemsize) for wire in wires)
    return Messages(num_workers, push, reply, num_behind)


def describe_memory(needs: Sequence[Need], libraries_bytes: float) -> list[str]:
    """Lines of a dry run. `libraries_bytes`: of a process before it has a model."""
    lines: list[str] = []
    for need in needs:
        parts = {"Python and libraries": libraries_bytes} | need.parts
        told = ", ".join(f"{name} {size_text(num_bytes)}" for name, num_bytes in parts.items() if num_bytes)
        lines.append(
            f"{'' if lines else 'memory':<12}{need.who}: {size_text(libraries_bytes + need.num_bytes)}"
        )
        lines += textwrap.wrap(told, _WIDTH, initial_indent=" " * 14, subsequent_indent=" " * 14)
    copies = [f"{need.who} {size_text(need.checkpoint_bytes)}" for need in needs if need.checkpoint_bytes]
    lines += textwrap.wrap(
        f"while a checkpoint is written: {', '.join(copies)} more, or nothing with --checkpoint-pause", _WIDTH,
        initial_indent=" " * 12, subsequent_indent=" " * 14,
    )  # fmt: skip
    return [*lines, "            and what the backward pass keeps of a batch (mpitrain plan)"]


def libraries_bytes() -> float:
    """Of a process of this run before it has a model, by this one, which has none either."""
    return float(resident_bytes() + _LIBRARIES_BYTES)


def _trained(sizes: Sizes, **more: float) -> dict[str, float]:
    """Of a rank that steps the whole model."""
    steps = {"parameters": sizes.parameters, "gradients": sizes.trained, "optimizer": sizes.optimizer or 0}
    return {**steps, **more, "the optimizer's step": sizes.step}


def _all_reduced(strategy: AllReduce, sizes: Sizes, messages: Messages) -> list[Need]:
    residual = 0 if strategy.codec.is_none or strategy.codec.sends_all else sizes.trained
    step = max(sizes.step, sizes.largest)  # backward makes a gradient before it is in its bucket
    return [Need("worker", _trained(sizes._replace(step=step), residual=residual), (*_STATE, "residual"))]


def _averaged(strategy: LocalSGD, sizes: Sizes, messages: Messages) -> list[Need]:
    anchor = sizes.trained if strategy.keeps_anchor else 0
    velocity = sizes.trained if strategy.outer != Average() else 0
    residual = (1 + 1 / messages.num_workers) * sizes.trained if strategy.wire == "int8" else 0
    parts = _trained(sizes, anchor=anchor, velocity=velocity, residual=residual)
    return [Need("worker", parts, (*_STATE, "anchor", "velocity", "residual"))]


def _told(strategy: Decentralized, sizes: Sizes, messages: Messages) -> list[Need]:
    senders = len(strategy.senders(0, messages.num_workers, 0))
    copies = senders * sizes.stepped if strategy.mixes and not strategy.codec.is_none else 0
    held = {
        "masters": 2 * sizes.masters,
        "updates": sizes.stepped + sizes.trained,  # its own, and the one that leaves
        "arriving updates": senders * messages.push,
        "copies": copies,
    }
    return [Need("worker", _trained(sizes, **held), (*_STATE, "copies"))]


def _served(strategy: ServerStrategy, sizes: Sizes, messages: Messages) -> list[Need]:
    num_workers, share = messages.num_workers, 1 / strategy.servers
    on_workers = strategy.steps_on_workers
    state = sizes.optimizer or 0
    rounds = strategy.reply_numbers != "full" or sizes.masters > 0
    masters = sizes.masters if strategy.moves else 0
    answers_apart = num_workers > 1  # the last may still leave when the last push of the next update has come
    push_bytes = share * messages.push
    arriving = push_bytes * _num_arriving(strategy, num_workers, push_bytes)
    if messages.push == sizes.stepped:  # the first comes into the model's own buffer, which nobody else needs
        arriving = max(0, arriving - push_bytes)
    each = {
        name: share * num_workers * sizes.stepped
        for name, kept in (
            ("copies for the codec", strategy.reply_codec),
            ("what each worker has read", strategy.damping.make_correction()),
        )
        if _is_kept(kept)
    }
    server = {
        "the whole model": sizes.parameters,
        "masters": masters,
        "shard": share * sizes.stepped,
        "optimizer": 0 if on_workers else share * state,
        "arriving pushes": arriving,
        "an earlier version, which leaves": share
        * (messages.reply if rounds else sizes.stepped)
        * answers_apart,
        "widened pushes": share * min(num_workers, 2) * sizes.masters,
        "replies": share * messages.reply if rounds else 0,
        **each,
    }
    worker = {
        "parameters": sizes.parameters,
        "gradients": sizes.trained,
        "masters": 2 * masters,
        "optimizer": state if on_workers else 0,
        "pushes": strategy.inflight * messages.push,
        "replies": messages.reply if strategy.reply_numbers != "full" or masters else 0,
        "the optimizer's step": sizes.step if on_workers else 0,
    }
    needs = [Need("server", server, ("shard", "optimizer", *each)), Need("worker", worker, ("optimizer",))]
    return needs + _between(strategy, sizes, messages)


def _between(strategy: ServerStrategy, sizes: Sizes, messages: Messages) -> list[Need]:
    """An aggregator holds what its workers have sent until all of it goes on, or is a sum, and the answers: one that
    all share where they wait for one another."""
    answers = messages.num_behind if strategy.contributors(set(range(messages.num_workers))) is None else 1
    parts = {
        "the whole model": sizes.parameters,
        "pushes on their way": messages.num_behind * strategy.inflight * messages.push,
        "replies on their way": answers * messages.reply,
    }
    return [Need("aggregator", parts)] if messages.num_behind else []


def _num_arriving(strategy: ServerStrategy, num_workers: int, push_bytes: float) -> float:
    """Pushes that one server holds at once, the one included that it steps with: all others stay with their senders."""
    num_let_in = max(1, WAITING_BYTES // max(1.0, push_bytes))
    if strategy.contributors(set(range(num_workers))) is not None:
        num_taken = num_waiting(push_bytes)
    else:
        num_taken = strategy.num_contributors(num_workers)
    return min(num_workers * strategy.inflight, num_taken + num_let_in)


def _is_kept(of: object) -> bool:
    return not of.is_none if isinstance(of, Codec) else of is not None


_NEEDS: dict[type[Strategy], Callable[..., list[Need]]] = {
    AllReduce: _all_reduced,
    LocalSGD: _averaged,
    Decentralized: _told,
    ServerStrategy: _served,
}
