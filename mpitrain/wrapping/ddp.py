"""A wrapped loop under allreduce: gradients averaged in the backward pass, and what a checkpoint of it holds.

Invariants: model and optimizer are the user's own and the same on all workers, so the first one writes them for
all; buffers, and what a codec keeps back, are each worker's. For another number of workers the latter are distributed
anew.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from mpitrain.errors import UsageError
from mpitrain.model.in_place import InPlaceGuard, held_alike
from mpitrain.model.optimizers.optimizer import Rates
from mpitrain.model.wire.codec_registry import check_optimizer
from mpitrain.mpi.runtime import Runtime
from mpitrain.strategies.allreduce import AllReduce
from mpitrain.strategies.part_names import own_part
from mpitrain.training.agree import attempt
from mpitrain.training.measure import share_module
from mpitrain.training.replica_guard import ReplicaGuard
from mpitrain.training.share_tree import share_tree
from mpitrain.wrapping.checkpoints import (
    Resumed,
    Saver,
    about_loop,
    find_run,
    keep_allreduce,
    lockstep_saver,
    loop_state,
)
from mpitrain.wrapping.exchange import Exchange
from mpitrain.wrapping.membership import make_group


def join_ddp(
    runtime: Runtime,
    model: nn.Module,
    optimizer: Optimizer,
    strategy: AllReduce,
    resume: Any,
    number: int = 0,
    find_unused: bool | None = None,
) -> tuple[Saver, Resumed | None]:
    """How to save, and what to go on from. `number`: of the model, where the program has several; `find_unused`: as
    for `Exchange`.

    Raises:
        UsageError (AgreedError under MPI): the codec does not fit the optimizer, or a checkpoint of another run.
    """
    runtime.role = "worker"
    check_optimizer(strategy.codec, optimizer)
    about = about_loop(strategy, model, runtime.size)
    run = find_run(runtime, resume, about, same_number=False, number=number)
    found = run.found
    rates = Rates(optimizer)
    part = own_part(runtime.rank)
    mine: Any = None
    first: Any = None
    if found is not None:
        mine = attempt(runtime, lambda: found.part(part) if part in found.parts else None)
        first = share_tree(runtime, mine)
        model.load_state_dict(first["module"])
        rates.restore(first["optimizer"])
    share_module(runtime, model)
    if number == 0:
        keep_allreduce(runtime, found, about)
        make_group(runtime)
    exchange = Exchange(model, strategy.codec, find_unused)
    hook = exchange.hook
    in_place = InPlaceGuard([*model.named_parameters()], "")
    guard = ReplicaGuard(runtime, strategy, lambda: held_alike(model), changed=lambda: in_place.changed)
    _watch_steps(runtime, model, optimizer, guard, exchange, in_place)
    if mine is not None:
        for buffer, saved in zip(model.buffers(), mine["buffers"], strict=True):
            buffer.copy_(saved)
    if found is not None and hook is not None:
        names = found.parts[runtime.rank :: runtime.size]
        held = [mine if name == part else found.part(name) for name in names]
        hook.restore_shares(first["codec"], [saved["codec"] for saved in held], len(found.parts))

    def take() -> dict[str, Any]:
        held = {"buffers": list(model.buffers()), "codec": hook.state() if hook else None}
        if runtime.rank:
            return held
        return held | {"module": model.state_dict(), "optimizer": rates.state()}

    saver = lockstep_saver(run, about, runtime.rank, runtime.size, take)
    return saver, loop_state(found, mine or first)


def _watch_steps(
    runtime: Runtime,
    model: nn.Module,
    optimizer: Optimizer,
    guard: ReplicaGuard,
    exchange: Exchange,
    in_place: InPlaceGuard,
) -> None:
    """A step is progress, and updates nothing whose gradients are not averaged."""
    averaged = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    num_groups = len(optimizer.param_groups)

    def check(optimizer: Optimizer, *_: object) -> None:
        exchange.check_whole()
        in_place.end_interval()
        for group in optimizer.param_groups[num_groups:]:
            if any(
                parameter.requires_grad and id(parameter) not in averaged for parameter in group["params"]
            ):
                raise UsageError(
                    "a parameter group that was added after mpitrain.wrap holds parameters whose gradients are not "
                    "averaged, for they were frozen, or not in the model, at that time: let them require gradients "
                    "before mpitrain.wrap, and add the group then or later"
                )

    def count(*_: object) -> None:
        guard.after_step()
        in_place.begin_interval()
        runtime.step += 1

    in_place.begin_interval()
    optimizer.register_step_pre_hook(check)
    optimizer.register_step_post_hook(count)
