"""A run over parameter servers: builds this rank's role and lets the MPI world carry it.

Invariants: it only composes. Roles decide nothing here; every rank derives everybody's role, shard and
sizes by itself.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.optim import Optimizer

from mpitrain.checkpoint import Keeper
from mpitrain.effects import Kind
from mpitrain.model import (
    ElasticStore,
    FlatModel,
    LocalSteps,
    Replica,
    ShardStore,
    check_optimizer,
    flat_model,
    local_steps,
    push_coder,
    remote_steps,
    reshard,
    shard_store,
)  # fmt: skip
from mpitrain.model.flat import Layout, make_layout
from mpitrain.model.step_hooks import StepHooks
from mpitrain.roles import Server, TolerantServer, Worker
from mpitrain.roles.failure_detector.silence import SIGNS_S
from mpitrain.roles.replay import record, save_order
from mpitrain.roles.server.fault_tolerant import NOT_FINITE
from mpitrain.roles.server.resharding import recut
from mpitrain.strategies.base import ServerStrategy
from mpitrain.strategies.sampling.dealer import Dealer
from mpitrain.training.measure import (
    Meter,
    build,
    compute_thread,
    finish_model,
    make_measure,
    num_warmup,
    pick_device,
    share_module,
)
from mpitrain.training.parameter_server.emergency_state import shard_writer, worker_writer
from mpitrain.training.parameter_server.run_role import carry, heartbeat_s
from mpitrain.training.resume import Resume, about_run, check, make_keeper, read_own_part
from mpitrain.training.resume_options import describe_optimizer, same_codec
from mpitrain.training.session import Session, attempt

# What the dealing server's shard tells of the whole run; every shard's own counts are under "ranks".
_SHOWN = (
    "accepted", "repeated", "late", "dropped", "nonfinite", "versions_skipped", "samples_dropped", "samples_left_out",
    "staleness_mean", "staleness_max", "staleness_histogram", "staleness_identity", "pushed_bytes", "replied_bytes",
    "lost",
)  # fmt: skip


def run_servers(session: Session) -> dict[str, Any]:
    """Serve or work, as this rank's role says; returns what this rank knows of the run."""
    runtime = session.runtime
    device = torch.device("cpu") if session.role == "server" else pick_device(runtime.local_rank)
    module, optimizer = attempt(runtime, lambda: build(session.job, session.overrides.lr, device))
    strategy = server_strategy(session)
    attempt(runtime, lambda: check_optimizer(optimizer, strategy))
    layout = attempt(runtime, lambda: make_layout(module, optimizer, len(session.roles.servers)))
    runtime.compare(
        {
            "parameters": [f"{n} {s}" for n, s in zip(layout.names, layout.shapes, strict=True)],
            "dtype": str(layout.dtype),
        }
    )
    share_module(runtime, module)
    said = about(session, layout, describe_optimizer(module, optimizer))
    attempt(runtime, lambda: check(session, said))
    model = flat_model(module, optimizer, strategy)
    local = attempt(runtime, lambda: _local_steps(session, model, optimizer))
    return (
        _serve(session, model, optimizer, said)
        if session.role == "server"
        else _work(session, model, local, optimizer, device, said)
    )


def _local_steps(session: Session, model: FlatModel, optimizer: Optimizer) -> LocalSteps | None:
    num_samples, num_workers = session.catalogue.num_samples, len(session.roles.workers)
    schedule = session.job.schedule
    return local_steps(model, optimizer, server_strategy(session), schedule, num_samples, num_workers)


def about(session: Session, layout: Layout, optimizer: list[str]) -> dict[str, Any]:
    """What this run's checkpoints say of it."""
    names = [f"{name} {shape}" for name, shape in zip(layout.names, layout.shapes, strict=True)]
    return about_run(session, names, session.strategy.family, optimizer)


def server_strategy(session: Session) -> ServerStrategy:
    """The strategy in force, of the server family."""
    assert isinstance(session.strategy, ServerStrategy)
    return session.strategy


def make_server(
    session: Session, store: ShardStore | ElasticStore, meter: Meter, keeper: Keeper | None = None
) -> TolerantServer:
    """This rank's server role."""
    strategy = server_strategy(session)
    job = session.job
    deals = session.runtime.rank == session.roles.dealer
    dealer = (
        Dealer(
            session.catalogue.num_samples,
            job.epochs,
            job.batch_size,
            session.num_batches(),
            job.drop_last,
            len(session.roles.workers),
            session.catalogue.window_samples,
        )
        if deals
        else None
    )
    return TolerantServer(
        strategy,
        store,
        session.roles.workers,
        meter,
        dealer,
        job.on_nonfinite,
        session.catalogue.num_samples,
        job.schedule if strategy.optimizer == "server" else None,
        job.batch_size,
        keeper,
        delivers=True,
        floor_s=session.overrides.heartbeat_s,
        vigilant=session.runtime.fault_tolerance == "heartbeat",
    )


def _serve(session: Session, model: FlatModel, optimizer: Optimizer, said: dict[str, Any]) -> dict[str, Any]:
    runtime, roles = session.runtime, session.roles
    shard = roles.servers.index(runtime.rank)
    strategy = server_strategy(session)
    store = shard_store(model, shard, optimizer, strategy, len(roles.workers))
    num_pushes = math.ceil(session.total_samples() / (session.job.batch_size * strategy.push_every))
    resume = session.resume
    meter = Meter(session.report, num_warmup(num_pushes), resume.mark if resume else 0)
    # workers with state of their own: the validator's buffers, and everybody's optimizer or residual where there is one
    # (or hooks, which may change its options)
    own = strategy.optimizer == "worker" or not strategy.push_codec.is_none or bool(StepHooks(optimizer, ()))
    writers = roles.workers if own else (roles.validator,)
    keeper = make_keeper(session, f"shard-{shard}", said, lambda: {"store": store.state()}, writers)
    server = make_server(session, store, meter, keeper)
    attempt(runtime, lambda: restore_shard(resume, server, store, model.layout, shard))
    order: list[int] = []
    losable = roles.workers if runtime.fault_tolerance == "ulfm" else ()
    session.emergency, role = shard_writer(session, server, store, keeper, model.module)
    role = record(role, order)
    counts = carry(session, roles.workers, lambda source, kind: store.frame(), role, losable=losable)
    # one whose gradients were not finite has left in order
    runtime.given_up.update(int(rank) for rank, how in counts["lost"].items() if how != NOT_FINITE)
    counts["lost"] |= {str(rank): "died" for rank in runtime.given_up & runtime.dead()}
    save_order(session.run_dir, shard, order)
    keeper.wait()
    counts["checkpoints"] = keeper.summary()
    counts |= store.statistics()
    counts["peak_waiting_buffers"] = store.pool.num_frames
    outcome: dict[str, Any] = {
        "detail": {"rank": runtime.rank, "role": "server", "shard": shard, **counts},
        "failure": counts["failure"],
        "requeue": server.cuts.ended,
        "unwritten": keeper.unwritten,
    }
    if runtime.rank == roles.dealer:
        outcome["result"] = {**meter.result(), **{key: counts[key] for key in _SHOWN}, **server.delivered}
    return outcome


def restore_shard(resume: Resume | None, server: Server, store: Any, layout: Layout, shard: int) -> None:
    """This shard's part, or, with another number of servers, all parts cut anew; counts then are those of the first.
    The dealing server looks at all parts, for shards are cut at pushes of their own."""
    if resume is None:
        return
    if resume.shards() == layout.num_shards:
        mine = read_own_part(resume, f"shard-{shard}")
    else:
        states = [read_own_part(resume, f"shard-{index}") for index in range(resume.shards())]
        before, (low, high) = layout.cut_into(len(states)).cuts, layout.cuts[shard : shard + 2]
        role = recut([state["role"] for state in states], before, low, high, server.epoch_samples)
        mine = {"role": role, "store": reshard([state["store"] for state in states], layout, shard)}
    store.restore(mine["store"])
    server.restore(mine["role"])
    if server.deals.dealer is not None:
        server.rejoin(resume.servers())


def _work(
    session: Session,
    model: FlatModel,
    local: LocalSteps | None,
    optimizer: Optimizer,
    device: torch.device,
    said: dict[str, Any],
) -> dict[str, Any]:
    runtime, roles, job, strategy = session.runtime, session.roles, session.job, server_strategy(session)
    validates = runtime.rank == roles.validator
    runtime.expendable = True
    with job.data.reader(session.catalogue, job.seed) as reader:
        measure = None
        if session.validation is not None:  # on every worker: any may have to take over
            measure = make_measure(
                job,
                model.module,
                job.validate.reader(session.validation, job.seed),
                device,
                runtime.stamp,
            )
        index = roles.workers.index(runtime.rank)
        coder = push_coder(model, strategy, len(roles.workers), index, job.seed)
        replica = Replica(
            model, job.loss, reader.batch, reader.prefetch, job.seed, index, measure, local=local,
            coder=coder, remote=remote_steps(model, optimizer, strategy),
        )  # fmt: skip
        worker = Worker(
            runtime.rank, roles, replica, session.report, wants_final=validates,
            push_every=strategy.push_every, pull_every=strategy.pulls, inflight=strategy.inflight,
            deliver=lambda: finish_model(session, replica),
            heartbeat_s=heartbeat_s(session), signs_s=SIGNS_S if strategy.holds_apart else 0.0,
        )  # fmt: skip
        keeper = make_keeper(session, f"worker-{index}", said, lambda: {"replica": replica.state()})
        worker.keeper = keeper
        attempt_restore(session, worker, replica, index)
        watched = session.overrides.watchdog_s > 0
        session.emergency, role = worker_writer(keeper, worker, model.module, watched)
        straggler = session.straggler()
        counts = carry(
            session,
            roles.servers,
            lambda source, kind: model.frame_for(roles.servers.index(source), kind == Kind.FINAL),
            straggler.wrap(role),
            computer=compute_thread(device) if strategy.inflight > 1 else None,
        )
    replica.finish()
    keeper.wait()
    told = {"codec": replica.statistics()} if replica.coder else {}
    detail = {"role": "worker", **counts, **told, "checkpoints": keeper.summary()}
    outcome: dict[str, Any] = {
        "detail": detail, "injected": straggler.counts(), "unwritten": keeper.unwritten
    }  # fmt: skip
    return outcome


def attempt_restore(session: Session, worker: Worker, replica: Replica, index: int) -> None:
    """This worker's part, where the checkpoint has one; parameters and leases come from the servers."""
    number = len(session.roles.workers)
    strategy = server_strategy(session)
    attempt(session.runtime, lambda: restore_worker(session.resume, worker, replica, index, number, strategy))


def restore_worker(
    resume: Resume | None, worker: Worker, replica: Replica, index: int, num_workers: int,
    strategy: ServerStrategy,
) -> None:  # fmt: skip
    """What worker number `index` goes on from."""
    if resume is None:
        return
    mine = read_own_part(resume, f"worker-{index}")
    if mine is not None:
        worker.restore(mine["role"])
        replica.restore(mine["replica"])
    elif replica.remote is not None and (first := read_own_part(resume, "worker-0")) is not None:
        replica.remote.restore(first["replica"].get("remote"))  # a worker that was not there before
    if replica.coder is not None and same_codec(resume.about, strategy, "push_wire"):
        replica.coder.restore(*_kept_by_workers(resume, index, num_workers))


def _kept_by_workers(
    resume: Resume, index: int, num_workers: int
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """What codecs had kept back on workers: that which falls to this worker (of those that wrote, the index-th, the one
    `num_workers` after it, and so on), and the first one's, which tells what all share."""
    written = sorted(int(name.split("-")[1]) for name in resume.parts if name.startswith("worker-"))

    def kept(worker: int) -> Any:
        part = read_own_part(resume, f"worker-{worker}")
        return part["replica"].get("coder") if part else None

    mine = [state for worker in written if worker % num_workers == index and (state := kept(worker))]
    return mine, kept(written[0]) if written else None
