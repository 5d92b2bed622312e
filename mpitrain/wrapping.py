"""Keep your own training loop: `model, optimizer = mt.wrap(model, optimizer, mt.Async(servers=1))` under
`mpirun` or `srun`.

Law of this file: nothing of the user's is touched except that everybody starts from rank 0's parameters and
buffers. `wrap` returns on workers only: a server serves inside it and then leaves the process. The loop is
the worker role turned inside out: where the role asks for a gradient the user's loop runs, and
`optimizer.step()` hands the gradient in.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from mpitrain.effects import Kind
from mpitrain.errors import EXIT_ERROR, UsageError
from mpitrain.report import NullReport
from mpitrain.roles import TolerantServer, Worker
from mpitrain.rules import AllReduce, Decentralized, LocalSGD, Roles, ServerStrategy, Strategy

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


@dataclasses.dataclass
class _Wrapped:
    """What `worker_index`, `num_workers` and `finish` speak about."""

    roles: Roles
    rank: int
    optimizer: Any


_wrapped: _Wrapped | None = None


def wrap(model: nn.Module, optimizer: Optimizer, strategy: Strategy | None = None) -> tuple[Any, Any]:
    """Make a model and its optimizer train together with those of all other ranks.

    Args:
        model, optimizer: as for one process. Their values are kept (rank 0's are broadcast); learning rates
            are not scaled.
        strategy: `AllReduce()` if None; server strategies take their server ranks out of the world.

    Returns:
        On workers, the model and optimizer to go on with. Under a server strategy the optimizer lives on the
        servers: `step()` pushes the gradients and brings the new parameters, and its options stay as they
            were at this call. Under `LocalSGD` `step()` averages when it is due, under `Decentralized` it
            exchanges with the other peers; take equally many steps on all workers.

    Under ULFM (`mpitrain launch --ft ulfm`) a server strategy goes on without a worker that dies; what it would have
    taken of the data is your loop's affair, since nothing but the loop knows it. Otherwise a death ends the job.

    Raises:
        UsageError (AgreedError under MPI): an optimizer or dtype that a server cannot hold, too few ranks, or
        a second `wrap`.
    """
    global _wrapped
    from mpitrain.mpi.runtime import start

    strategy = strategy or AllReduce()
    runtime = start()
    if _wrapped is not None:
        raise UsageError("mpitrain.wrap was called before in this process; one model per run")
    if isinstance(strategy, AllReduce):
        from mpitrain.model.compression import check_optimizer
        from mpitrain.mpi.process_group import init_default_group
        from mpitrain.training.measure import share_module
        from mpitrain.training.parallel import attach, data_parallel

        runtime.role = "worker"
        check_optimizer(strategy.codec, optimizer)
        share_module(runtime, model)
        init_default_group(runtime)
        _wrapped = _Wrapped(Roles((), tuple(range(runtime.size))), runtime.rank, None)
        parallel = data_parallel(model)
        attach(parallel, strategy.codec)
        return parallel, optimizer
    if isinstance(strategy, LocalSGD):
        return _average(runtime, model, optimizer, strategy)
    if isinstance(strategy, Decentralized):
        from mpitrain.peered import join_peers

        peer = join_peers(runtime, model, optimizer, strategy)
        _wrapped = _Wrapped(Roles((), tuple(range(runtime.size))), runtime.rank, peer)
        return model, peer
    remote = _join(runtime, model, optimizer, strategy)
    _wrapped = _Wrapped(remote.roles, runtime.rank, remote)
    return model, remote


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
    if _current().optimizer is not None:
        _current().optimizer.finish()


def _current() -> _Wrapped:
    if _wrapped is None:
        raise UsageError("call mpitrain.wrap(model, optimizer, strategy) first")
    return _wrapped


def _average(runtime: Any, model: nn.Module, optimizer: Optimizer, strategy: LocalSGD) -> tuple[Any, Any]:
    """Workers that step by themselves and average now and then."""
    global _wrapped
    from mpitrain.averaged import AveragedOptimizer
    from mpitrain.mpi.process_group import init_default_group
    from mpitrain.training.averaging import Averager
    from mpitrain.training.measure import share_module
    from mpitrain.training.parallel import data_parallel

    if strategy.unit != "steps":
        raise UsageError(f'{strategy}: your own loop counts steps, not samples; use unit="steps" with wrap')
    runtime.role = "worker"
    runtime.compare({"strategy": str(strategy)})
    share_module(runtime, model)
    init_default_group(runtime)
    averager = Averager(model, optimizer, strategy)
    parallel = data_parallel(model) if strategy.start else None
    averaged = AveragedOptimizer(runtime, optimizer, averager, parallel)
    _wrapped = _Wrapped(Roles((), tuple(range(runtime.size))), runtime.rank, averaged)
    return parallel or model, averaged


def _join(runtime: Any, model: nn.Module, optimizer: Optimizer, strategy: Strategy) -> Any:
    """Set up the roles; on a server, serve and leave."""
    from mpitrain.model import Replica, check_optimizer, flat_model, local_steps, push_coder, shard_store
    from mpitrain.mpi.world import MpiWorld
    from mpitrain.remote import RemoteOptimizer
    from mpitrain.training.measure import share_module
    from mpitrain.training.session import assign_roles, attempt

    roles = attempt(runtime, lambda: assign_roles(runtime, strategy, own_loop=True))
    assert isinstance(strategy, ServerStrategy), strategy
    runtime.role = roles.of(runtime.rank)
    attempt(runtime, lambda: check_optimizer(optimizer, strategy))
    flat = attempt(runtime, lambda: flat_model(model, optimizer, strategy))
    local = attempt(runtime, lambda: local_steps(flat, optimizer, strategy))
    runtime.compare(
        {
            "strategy": str(strategy),
            "parameters": [f"{n} {s}" for n, s in zip(flat.layout.names, flat.layout.shapes, strict=True)],
        }
    )
    share_module(runtime, model)
    flat.refresh()

    def on_step(step: int) -> None:
        runtime.step = step

    if runtime.role == "server":
        shard = roles.servers.index(runtime.rank)
        store = shard_store(flat, shard, optimizer, strategy, len(roles.workers))
        server = TolerantServer(strategy, store, roles.workers, NullReport())
        server.attendance.least_silence_s = (
            math.inf
        )  # how long a loop that is not ours may take, nobody knows
        losable = roles.workers if runtime.fault_tolerance == "ulfm" else ()
        world = MpiWorld(
            runtime.engine, roles.workers, lambda source, kind: store.frame(), on_step, losable=losable
        )
        _leave(runtime, world.run(server.run()))

    def frame_for(source: int, kind: Kind) -> Any:
        return flat.frame_for(roles.servers.index(source), kind == Kind.FINAL)

    runtime.expendable = True
    world = MpiWorld(runtime.engine, roles.servers, frame_for, on_step)
    if strategy.inflight > 1:
        _poll_in_backward(flat.parameters, runtime.engine)
    coder = push_coder(flat, strategy, len(roles.workers), runtime.rank, 0)
    replica = Replica(flat, _no_loss, _no_fetch, _no_fetch, 0, runtime.rank, local=local, coder=coder)
    worker = Worker(
        runtime.rank, roles, replica, NullReport(), leased=False,
        push_every=strategy.push_every, pull_every=strategy.pulls, inflight=strategy.inflight,
    )  # fmt: skip
    return RemoteOptimizer(runtime, optimizer, strategy, replica, worker, world)


def _leave(runtime: Any, counts: dict[str, Any]) -> NoReturn:
    """A server's end, when all workers have left or are lost."""
    runtime.given_up |= {int(rank) for rank in counts["lost"]} | runtime.dead()
    if counts["failure"]:
        print(f"mpitrain: error: {counts['failure']}", file=sys.stderr, flush=True)
        runtime.exit_code = EXIT_ERROR
    runtime.finish()
    sys.exit(runtime.exit_code)


def _poll_in_backward(parameters: list[Any], engine: Any) -> None:
    """Drive MPI whenever a gradient is ready: the push before travels while this batch is computed. Only on the
    thread that owns MPI (a GPU's backward runs on another)."""

    def poll(parameter: Any) -> None:
        if engine.owns_mpi:
            engine.poll()

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(poll)


def _no_loss(model: Any, batch: Any) -> Any:
    raise AssertionError("the loop is the user's own")


def _no_fetch(epoch: int, start: int, count: int) -> Any:
    raise AssertionError("the data is the user's own")
