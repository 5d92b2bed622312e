"""A run over parameter servers: builds this rank's role and lets the MPI world carry it.

Law of this file: it only composes. Roles decide nothing here; every rank derives everybody's role, shard and
sizes by itself.
"""

from __future__ import annotations

import math
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import torch

from mpitrain.effects import Kind, Role
from mpitrain.model import (
    ElasticStore,
    FlatModel,
    LocalSteps,
    Replica,
    ShardStore,
    check_optimizer,
    flat_model,
    local_steps,
    shard_store,
)  # fmt: skip
from mpitrain.model.flat import make_layout
from mpitrain.mpi.world import MpiWorld
from mpitrain.replay import record, save_order
from mpitrain.roles import Server, Worker
from mpitrain.rules import Dealer, ServerStrategy
from mpitrain.training.measure import (
    MODEL_FILE,
    Meter,
    build,
    make_measure,
    num_warmup,
    pick_device,
    save_model,
    share_module,
)
from mpitrain.training.session import Session, attempt

# What the dealing server's shard tells of the whole run; every shard's own counts are under "ranks".
_SHOWN = (
    "accepted", "late", "dropped", "nonfinite", "skipped", "samples_dropped", "samples_left_out", "staleness_mean",
    "staleness_max", "staleness_histogram", "staleness_identity", "pushed_bytes", "replied_bytes",
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
    model = flat_model(module, optimizer, strategy)
    local = attempt(runtime, lambda: _local_steps(session, model, optimizer))
    return (
        _serve(session, model, optimizer)
        if session.role == "server"
        else _work(session, model, local, device)
    )


def _local_steps(session: Session, model: FlatModel, optimizer: torch.optim.Optimizer) -> LocalSteps | None:
    num_samples, num_workers = session.catalogue.num_samples, len(session.roles.workers)
    schedule = session.job.schedule
    return local_steps(model, optimizer, server_strategy(session), schedule, num_samples, num_workers)


def server_strategy(session: Session) -> ServerStrategy:
    """The strategy in force, of the server family."""
    assert isinstance(session.strategy, ServerStrategy)
    return session.strategy


def make_server(session: Session, store: ShardStore | ElasticStore, meter: Meter) -> Server:
    """This rank's server role."""
    strategy = server_strategy(session)
    job = session.job
    deals = session.runtime.rank == session.roles.dealer
    dealer = (
        Dealer(
            session.catalogue.num_samples, job.epochs, job.batch_size, session.num_batches(), job.drop_last
        )
        if deals
        else None
    )
    return Server(
        strategy,
        store,
        session.roles.workers,
        meter,
        dealer,
        job.on_nonfinite,
        session.catalogue.num_samples,
        job.schedule if strategy.optimizer == "server" else None,
        job.batch_size,
    )


def _serve(session: Session, model: FlatModel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    runtime, roles = session.runtime, session.roles
    shard = roles.servers.index(runtime.rank)
    strategy = server_strategy(session)
    store = shard_store(model, shard, optimizer, strategy, len(roles.workers))
    num_pushes = math.ceil(session.total_samples() / (session.job.batch_size * strategy.push_every))
    meter = Meter(session.report, num_warmup(num_pushes))
    server = make_server(session, store, meter)
    order: list[int] = []
    counts = _carry(session, roles.workers, lambda source, kind: store.frame(), record(server.run(), order))
    save_order(session.run_dir, shard, order)
    counts["peak_waiting_buffers"] = store.pool.num_frames
    outcome: dict[str, Any] = {
        "detail": {"rank": runtime.rank, "role": "server", "shard": shard, **counts},
        "failure": counts["failure"],
    }
    if runtime.rank == roles.dealer:
        outcome["result"] = {**meter.result(), **{key: counts[key] for key in _SHOWN}}
    return outcome


def _work(
    session: Session, model: FlatModel, local: LocalSteps | None, device: torch.device
) -> dict[str, Any]:
    runtime, roles, job, strategy = session.runtime, session.roles, session.job, server_strategy(session)
    validates = runtime.rank == roles.validator
    with job.data.reader(session.catalogue, job.seed) as reader:
        measure = None
        if validates and session.validation is not None:
            measure = make_measure(
                job, model.module, job.validate.reader(session.validation, job.seed), device
            )
        replica = Replica(
            model, job.loss, reader.batch, reader.prefetch, job.seed, runtime.rank, measure, local=local
        )
        worker = Worker(
            runtime.rank, roles, replica, session.report, wants_final=validates,
            push_every=strategy.push_every, pull_every=strategy.pulls, inflight=strategy.inflight,
        )  # fmt: skip
        straggler = session.straggler()
        counts = _carry(
            session,
            roles.servers,
            lambda source, kind: model.frame_for(roles.servers.index(source), kind == Kind.FINAL),
            straggler.wrap(worker.run()),
            computer=_computer(device) if strategy.inflight > 1 else None,
        )
    outcome: dict[str, Any] = {"detail": {"role": "worker", **counts}, "injected": straggler.counts()}
    if validates:
        outcome["result"] = finish_model(session, replica)
    return outcome


def _carry(
    session: Session, peers: tuple[int, ...], frame_for: Any, role: Role, computer: Executor | None = None
) -> Any:
    def on_step(step: int) -> None:
        session.runtime.step = step

    return MpiWorld(session.runtime.engine, peers, frame_for, on_step, computer).run(role)


def _computer(device: torch.device) -> Executor:
    """A thread to compute on while the main thread drives MPI; the current GPU is a thread's own."""
    set_device = (lambda: torch.cuda.set_device(device)) if device.type == "cuda" else None
    return ThreadPoolExecutor(1, "mpitrain-compute", initializer=set_device)


def finish_model(session: Session, replica: Replica) -> dict[str, Any]:
    """The validator's last duty: save first, then measure."""
    path = session.run_dir / MODEL_FILE
    save_model(
        replica.take_module(), path, {"strategy": str(session.strategy), "job": session.job.name or ""}
    )
    return {"metrics": replica.validate(), "model": str(path)}
