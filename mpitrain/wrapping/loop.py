"""Keep your own training loop: `model, optimizer = mt.wrap(model, optimizer, mt.Async(servers=1))` under
`mpirun` or `srun`.

Invariants: the model that comes back is the user's, and nothing of it is changed, except that all ranks start from
rank 0's parameters and buffers, and that it answers to `module` and `no_sync`. `wrap` returns on workers only: a server
serves inside it and then leaves the process. The loop is the worker role turned inside out: where the role asks for a
gradient the user's loop runs, and `optimizer.step()` hands the gradient in.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import json
import math
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeAlias

from mpitrain.errors import EXIT_ERROR, UsageError
from mpitrain.reporting.report import NullReport, default_run_dir
from mpitrain.roles import SaveRequest
from mpitrain.strategies.allreduce import AllReduce
from mpitrain.strategies.base import ServerStrategy, Strategy
from mpitrain.strategies.decentralized import Decentralized
from mpitrain.strategies.features import LOOP, why_not
from mpitrain.strategies.local_sgd import LocalSGD
from mpitrain.strategies.placement import Roles
from mpitrain.system.launched.ranks import Ends
from mpitrain.system.saying import tell

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from mpitrain.model import FlatModel
    from mpitrain.mpi.engine.engine import Engine
    from mpitrain.mpi.runtime import Runtime
    from mpitrain.training.parameter_server.builder import AnyStore, RoleBuilder
    from mpitrain.training.watchdog.watchdog import LoopWatchdog
    from mpitrain.wrapping.checkpoints import LoopRun, Resumed, Saver


class Joined(Protocol):
    """The optimizer that stands for the user's own."""

    def finish(self) -> None:
        """Wait for the others' last step."""


@dataclasses.dataclass
class _Wrapped:
    """What `worker_index`, `num_workers`, `finish`, `save` and `resumed` speak about. `optimizers`: of all models,
    where another stands for the user's own; `saver`: of the first model, which takes what the others hold along."""

    roles: Roles
    rank: int
    optimizers: list[Joined]
    saver: Saver
    resumed: Resumed | None
    strategy: Strategy
    resume: ResumeFrom = None
    watchdog: LoopWatchdog | None = None
    finished: bool = False


ResumeFrom: TypeAlias = "str | os.PathLike[str] | None"
_wrapped: _Wrapped | None = None


def wrap(
    model: nn.Module,
    optimizer: Optimizer,
    strategy: Strategy | None = None,
    resume: str | os.PathLike[str] | None = None,
    watchdog_s: float = 1800.0,
    find_unused_parameters: bool | None = None,
) -> tuple[Any, Any]:
    """Make a model and its optimizer train together with those of all other ranks.

    Args:
        model, optimizer: as for one process. Rank 0's values are broadcast; learning rates are not scaled.
        strategy: `AllReduce()` if None; server strategies take their server ranks out of the world.
        resume: a directory given to `save`: go on from the newest checkpoint there that verifies, or from the
            beginning where there is none; `resumed()` says which.
        watchdog_s: end the job when a rank neither steps nor waits for others for so long, with the stacks of all
            ranks under `resume`, or else under `runs/`; it must exceed the longest time between two steps, a
            validation of your own included. 0 is never; `finish()` ends the watch.
        find_unused_parameters: whether a backward pass may leave out parameters, where gradients are averaged; None to
            find out at the first step, as for a job.

    Returns:
        On workers, the model and optimizer to go on with. The model is yours: whatever you call of it, `backward()` of
        the loss averages gradients where the strategy does, once each time, so all ranks call it equally often; in
        `with model.no_sync():` gradients add up unaveraged, and `model.module` is the model. The optimizer stands for
        yours and shares its groups and hooks, so schedulers and whatever else holds yours may be made before or after.
        Under a server strategy the servers take its steps: `step()` pushes the gradients, with the rates and other
        options of the groups where you have changed them, and brings the new parameters; state that it has at this call
        goes along. Under `LocalSGD` `step()` averages when it is due, under `Decentralized` it exchanges with the other
        peers; take equally many steps on all workers.

    A program with several models, such as a GAN, calls `wrap` for each, all under the same `AllReduce` or `LocalSGD`;
    `save`, `resumed` and `finish` are then of all of them. Servers and peers take one model.

    Under ULFM (`mpitrain launch --ft ulfm`) a server strategy goes on without a worker that dies; what it would have
    taken of the data is your loop's affair. Otherwise a death ends the job.

    Raises:
        UsageError (AgreedError under MPI): what a server cannot hold, too few ranks, or a second model of one only.
        LostRankError (from `step()` under `LocalSGD` and `Decentralized`): a rank has left its loop early.
    """
    global _wrapped
    from mpitrain.mpi.runtime import start
    from mpitrain.training.agree import attempt

    strategy, runtime = strategy or AllReduce(), start()
    attempt(runtime, lambda: _check_sparse(model, optimizer, strategy))
    if _wrapped is not None:
        _check_another(_wrapped, strategy, resume)
        number, place = _wrapped.saver.number_of_next, _wrapped.resume
        another, joined = _join_all(
            runtime, model, optimizer, strategy, place, find_unused_parameters, number
        )
        _wrapped.saver.take_along(another.saver)
        _wrapped.optimizers += another.optimizers
        return model, joined
    watchdog = _watch(runtime, strategy, resume, watchdog_s)
    _wrapped, joined = _join_all(runtime, model, optimizer, strategy, resume, find_unused_parameters)
    _wrapped.watchdog = watchdog
    return model, joined


def _check_sparse(model: nn.Module, optimizer: Optimizer, strategy: Strategy) -> None:
    from mpitrain.model.gradient.sparse_gradients import (
        check_served_layers,
        check_sparse_layers,
        check_sparse_optimizer,
    )

    check_sparse_layers(model, why_not("sparse", strategy, LOOP))
    check_served_layers(model, why_not("served", strategy, LOOP))
    check_sparse_optimizer(model, optimizer)


def _check_another(first: _Wrapped, strategy: Strategy, resume: ResumeFrom) -> None:
    """Refuse a second model where the first one's strategy takes no other."""
    if why := why_not("several models", strategy, LOOP):
        raise UsageError(
            f"{strategy}: mpitrain.wrap was called before, and its {why} alone; several models train under allreduce() "
            "and localsgd()"
        )
    if strategy != first.strategy:
        raise UsageError(
            f"mpitrain.wrap: another model of this program is trained under {first.strategy}, and this one under "
            f"{strategy}; give all of them the same strategy"
        )
    if resume is not None and (first.resume is None or Path(resume) != Path(first.resume)):
        raise UsageError(
            f"mpitrain.wrap: this model is to resume from {resume}, and the first one from {first.resume}; a "
            "checkpoint holds all models, so give all of them the same directory"
        )


def _join_all(
    runtime: Runtime,
    model: Any,
    optimizer: Optimizer,
    strategy: Strategy,
    resume: ResumeFrom,
    find_unused: bool | None,
    number: int = 0,
) -> tuple[_Wrapped, Any]:
    """What this process has joined, by the family of the strategy, and the optimizer to go on with. `number`: of the
    model, where there are several."""
    from mpitrain.model.wire.masters import without_masters
    from mpitrain.wrapping.exchange import answer_as_ddp

    if runtime.rank == 0 and (text := without_masters(model, strategy)):
        tell(f"mpitrain: {text}")
    everybody = Roles((), tuple(range(runtime.size)))
    joined: Any = None  # one of several kinds of optimizer
    if isinstance(strategy, AllReduce):
        from mpitrain.wrapping.ddp import join_ddp

        saver, resumed = join_ddp(runtime, model, optimizer, strategy, resume, number, find_unused)
    elif isinstance(strategy, LocalSGD):
        from mpitrain.wrapping.local_sgd_optimizer import join_local_sgd

        joined, saver, resumed = join_local_sgd(
            runtime, model, optimizer, strategy, resume, number, find_unused
        )
    elif isinstance(strategy, Decentralized):
        from mpitrain.wrapping.peer_optimizer import join_peers

        joined, saver, resumed = join_peers(runtime, model, optimizer, strategy, resume)
    else:
        joined, saver, resumed = _join(runtime, model, optimizer, strategy, resume)
        everybody = joined.roles
    others = [] if joined is None else [joined]
    wrapped = _Wrapped(everybody, runtime.rank, others, saver, resumed, strategy, resume)
    answer_as_ddp(model)
    return wrapped, optimizer if joined is None else joined


def _watch(runtime: Runtime, strategy: Strategy, resume: ResumeFrom, timeout_s: float) -> LoopWatchdog:
    """Collective: from here on every rank owes progress."""
    from mpitrain.training.session import assign_roles, attempt
    from mpitrain.training.watchdog.watchdog import LoopWatchdog

    def check() -> Roles:
        if not 0 <= timeout_s < math.inf:
            raise UsageError(f"wrap: watchdog_s must be finite and at least 0 (0 is never), got {timeout_s}")
        return assign_roles(runtime, strategy, own_loop=True)

    roles = attempt(runtime, check)
    runtime.compare({"watchdog_s": timeout_s})
    folder = resume or default_run_dir(Path(sys.argv[0] or "loop").stem or "loop")
    run_dir = Path(runtime.broadcast(str(Path(folder).resolve())))
    watchdog = LoopWatchdog(runtime, run_dir, strategy, roles, timeout_s)
    atexit.register(watchdog.__exit__)  # what is done after the loop's end owes no progress
    return watchdog.__enter__()


def worker_index() -> int:
    """This worker's number, 0 to `num_workers() - 1`: which part of the data is yours. The lowest worker
    saves and prints.
    """
    return _current().roles.workers.index(_current().rank)


def num_workers() -> int:
    """How many workers there are; servers do not count."""
    return len(_current().roles.workers)


def finish() -> None:
    """Wait until every worker has taken its last step; the model then holds the final parameters on each of
    them.
    """
    current = _current()
    for optimizer in current.optimizers:
        optimizer.finish()
    current.finished = True
    if current.watchdog is not None:
        current.watchdog.__exit__()


def save(run_dir: str | os.PathLike[str], step: int, state: object = None, keep: int = 2) -> None:
    """Write a checkpoint, `run_dir/checkpoints/STEP`; every worker calls it at the same step of its loop, after
    `optimizer.step()`. It holds the model, the optimizers and what strategies and codecs keep, on servers too; on
    return this worker's part and those of all servers are written, and when all workers have returned, all of it.

    Args:
        step: names the checkpoint; larger than that of the one before.
        state: of the loop itself (position in the data, schedulers), on this worker: numbers, texts, lists, dicts and
            tensors. `resumed()` gives it back.
        keep: complete checkpoints to keep beside this one.

    Raises:
        UsageError: workers at different steps, or peers that never wait for one another, which have no common step.
        CheckpointError: this worker's part could not be written; the checkpoints before it are untouched.
    """
    if step < 1 or keep < 1:
        raise UsageError(f"save: step and keep must be at least 1, got step={step}, keep={keep}")
    _current().saver.save(Path(run_dir).resolve(), step, state, keep)


def resumed() -> Resumed | None:
    """What `wrap(..., resume=...)` goes on from: the `step` and the `state` that this worker had given to `save`; None
    from the beginning."""
    return _current().resumed


def _current() -> _Wrapped:
    if _wrapped is None:
        raise UsageError("call mpitrain.wrap(model, optimizer, strategy) first")
    return _wrapped


def _join(
    runtime: Runtime, model: nn.Module, optimizer: Optimizer, strategy: Strategy, resume: ResumeFrom
) -> tuple[Any, Saver, Resumed | None]:
    """Set up the roles; on a server, serve and leave."""
    from mpitrain.model import check_optimizer, flat_model
    from mpitrain.mpi.world import MpiWorld
    from mpitrain.training.fault_tolerance import check_own_loop
    from mpitrain.training.measure import share_module
    from mpitrain.training.parameter_server.builder import RoleBuilder
    from mpitrain.training.parameter_server.run import restore_worker, why_at_the_centre
    from mpitrain.training.session import assign_roles, attempt
    from mpitrain.wrapping.checkpoints import Saver, about_loop, find_run, loop_state
    from mpitrain.wrapping.server_optimizer import ServerOptimizer

    roles = attempt(runtime, lambda: assign_roles(runtime, strategy, own_loop=True))
    assert isinstance(strategy, ServerStrategy), strategy
    attempt(runtime, lambda: check_own_loop(runtime))
    runtime.role = roles.of(runtime.rank)
    attempt(runtime, lambda: check_optimizer(optimizer, strategy))
    flat = attempt(runtime, lambda: flat_model(model, optimizer, strategy))
    builder = RoleBuilder(strategy, roles, flat)
    local = attempt(runtime, lambda: builder.local(optimizer))
    runtime.compare(attempt(runtime, lambda: _start_of(strategy, flat, optimizer)))
    about = about_loop(strategy, model, len(roles.workers)) | {"servers": len(roles.servers)}
    run = find_run(runtime, resume, about, same_number=False, roles=roles)
    found = run.found
    if text := attempt(runtime, lambda: why_at_the_centre(found, strategy, runtime.rank)):
        tell(f"mpitrain: own parameters: {text}")
    share_module(runtime, model)
    flat.refresh()

    serves = runtime.role == "server"
    store = attempt(
        runtime, lambda: builder.store(roles.servers.index(runtime.rank), optimizer) if serves else None
    )
    if store is not None:
        _serve(runtime, builder, store, about, run)
    runtime.may_die_alone = True
    world = MpiWorld(
        runtime.engine, roles.servers, builder.buffer_for, functools.partial(setattr, runtime, "step")
    )
    if strategy.inflight > 1:
        _poll_in_backward(flat.parameters, runtime.engine)
    index = roles.workers.index(runtime.rank)
    replica = builder.replica(runtime.rank, optimizer, local)
    worker = builder.worker(runtime.rank, replica, NullReport())
    mine = attempt(
        runtime, lambda: restore_worker(found, worker, replica, index, len(roles.workers), strategy)
    )
    wrapped = ServerOptimizer(runtime, optimizer, strategy, replica, worker, world)
    wrapped.start()

    def take(step: int, run_dir: Path, keep: int) -> dict[str, Any]:
        return wrapped.save(SaveRequest(step, json.dumps({"run_dir": str(run_dir), "keep": keep})))

    saver = Saver(run, about, f"worker-{index}", [], take)
    return wrapped, saver, loop_state(found, mine)


def _start_of(strategy: ServerStrategy, flat: FlatModel, optimizer: Optimizer) -> dict[str, Any]:
    """What all ranks must begin with alike."""
    from mpitrain.model.optimizers.group_options import read_groups
    from mpitrain.model.optimizers.optimizer_state import state_digest

    return {
        "strategy": str(strategy),
        "parameters": [f"{n} {s}" for n, s in zip(flat.layout.names, flat.layout.shapes, strict=True)],
        "options of the optimizer": read_groups(optimizer),
        "state of the optimizer": state_digest(optimizer, flat.parameters),
    }


def _serve(
    runtime: Runtime, builder: RoleBuilder, store: AnyStore, about: dict[str, Any], run: LoopRun
) -> NoReturn:
    """Until all workers have left or are lost; then leave the process."""
    from mpitrain.mpi.world import MpiWorld
    from mpitrain.roles.server.gathering import WAITING_BYTES
    from mpitrain.training.parameter_server.run import restore_shard
    from mpitrain.training.session import attempt
    from mpitrain.wrapping.checkpoints import write_shard

    roles = builder.roles
    shard = roles.servers.index(runtime.rank)
    write = write_shard(run, f"shard-{shard}", about, roles.workers, store)
    # nobody knows how long a batch of a loop that is not ours may take
    server = builder.loop_server(store, NullReport(), math.inf, write)
    attempt(runtime, lambda: restore_shard(run.found, server, store, builder.model.layout, shard))
    may_die = roles.workers if runtime.fault_tolerance == "ulfm" else ()
    on_step = functools.partial(setattr, runtime, "step")
    world = MpiWorld(
        runtime.engine, roles.workers, lambda source, kind: store.wire_buffer(), on_step, ends=Ends(may_die),
        room_bytes=WAITING_BYTES,
    )  # fmt: skip
    counts = world.run(server.run())
    runtime.evicted |= {int(rank) for rank in counts["lost"]} | runtime.dead()
    if counts["failure"]:
        tell(f"mpitrain: error: {counts['failure']}")
        runtime.exit_code = EXIT_ERROR
    runtime.finish()
    sys.exit(runtime.exit_code)


def _poll_in_backward(parameters: list[nn.Parameter], engine: Engine) -> None:
    """Drive MPI whenever a gradient is ready: the push before travels while this batch is computed. Only on the
    thread that owns MPI (a GPU's backward runs on another)."""

    owner = threading.get_ident()

    def poll(parameter: Any) -> None:
        if threading.get_ident() == owner and engine.owns_mpi:
            engine.poll()

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(poll)
