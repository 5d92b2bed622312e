"""A run over parameter servers: builds this rank's role and lets the MPI world run it.

Invariants: this file only composes. Every rank derives all roles, shards and sizes by itself.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any

import torch
from torch.optim import Optimizer

from mpitrain.checkpoint import Checkpoint
from mpitrain.checkpoint.parts import read_numbers
from mpitrain.effects import Role
from mpitrain.embedding.tables import tables_of
from mpitrain.errors import EvictedError, LostRankError, UsageError
from mpitrain.messages import Kind
from mpitrain.model import FlatModel, LocalSteps, Replica, check_optimizer, flat_model, reshard
from mpitrain.model.gradient.trained_buffers import trained_buffers
from mpitrain.model.optimizers.optimizer import Rates
from mpitrain.model.optimizers.step_hooks import StepHooks
from mpitrain.model.replicas.hybrid_replica import HybridReplica
from mpitrain.model.shards.tabled_shard import TabledStore
from mpitrain.model.wire.buffers import FixedBuffer, VariableBuffer
from mpitrain.model.wire.flat import Layout, make_layout
from mpitrain.model.wire.node_sums import ByteBuffers
from mpitrain.roles import Duties, Server, Worker
from mpitrain.roles.bundles import bundled
from mpitrain.roles.failure_detector.silence import MID_SILENCE_S
from mpitrain.roles.failure_detector.worker_side import report_failure
from mpitrain.roles.replay import record, recording
from mpitrain.roles.server.fault_tolerant import NOT_FINITE
from mpitrain.roles.server.gathering import WAITING_BYTES
from mpitrain.roles.server.resharding import num_row_pieces, processed_by, reshard_role
from mpitrain.strategies.base import ServerStrategy
from mpitrain.strategies.schedules import Pace
from mpitrain.strategies.ticks import Law
from mpitrain.system.launched.ranks import Ends
from mpitrain.training import signals
from mpitrain.training.fault_tolerance import survives
from mpitrain.training.measure import (
    Meter,
    compute_thread,
    num_warmup,
    share_module,
)
from mpitrain.training.outcome import RunOutcome
from mpitrain.training.parameter_server.builder import AnyStore, RoleBuilder
from mpitrain.training.parameter_server.emergency_state import shard_writer, worker_writer
from mpitrain.training.resuming.initial_weights import build_on_ranks
from mpitrain.training.resuming.resume import (
    about_run,
    check,
    make_checkpoint_writer,
    read_own_part,
    restoring,
)
from mpitrain.training.resuming.resume_options import describe_optimizer, same_codec
from mpitrain.training.routes import dense_tables, make_dense
from mpitrain.training.schedule import go_on, goes_by_figures, report_end_of
from mpitrain.training.served_tables import save_tables
from mpitrain.training.session import Session, attempt
from mpitrain.training.trained.deliver import save_final
from mpitrain.training.validations.averaged_model import AverageFile
from mpitrain.training.validations.measured_tables import measured_by_workers
from mpitrain.training.validations.validation import make_measure

# The counts of the dealing server's shard that stand for the whole run; every shard's own counts are under "ranks".
_SHOWN = (
    "accepted", "repeated", "late", "dropped", "nonfinite", "versions_skipped", "samples_dropped", "samples_left_out",
    "staleness_mean", "staleness_max", "staleness_histogram", "staleness_identity", "pushed_bytes", "replied_bytes",
    "lost",
)  # fmt: skip


def run_servers(session: Session) -> RunOutcome:
    """Serve or work, as this rank's role says; returns what this rank knows of the run."""
    runtime = session.runtime
    device = session.device
    module, optimizer = build_on_ranks(session, device, session.overrides.lr)
    strategy = server_strategy(session)
    if strategy.reduces:
        dense = attempt(
            runtime, lambda: dense_tables(session.job, module, session.catalogue) if runtime.rank == 0 else []
        )
        make_dense(module, runtime.broadcast(dense))
    attempt(runtime, lambda: check_optimizer(optimizer, strategy))
    layout = attempt(
        runtime, lambda: make_layout(module, optimizer, strategy.servers, strategy.reduces, str(strategy))
    )
    runtime.compare(
        {
            "parameters": [f"{n} {s}" for n, s in zip(layout.names, layout.shapes, strict=True)],
            "dtype": f"{layout.dtype} as {layout.wire_dtype}",
        }
    )
    share_module(runtime, module)
    tables = [f"table {table.name} {(table.num_rows, table.width)}" for table in tables_of(module)]
    about_this_run = about(session, layout, describe_optimizer(module, optimizer), tables)
    attempt(runtime, lambda: check(session, about_this_run))
    attempt(runtime, lambda: check_sums(session))
    if text := attempt(runtime, lambda: why_at_the_centre(session.resume, strategy, runtime.rank)):
        session.report.event("own parameters", text=text)
    model = flat_model(module, optimizer, strategy)
    builder = RoleBuilder(
        strategy, session.roles, model, session.job, session.catalogue, session.num_batches()
    )
    local = attempt(runtime, lambda: builder.local(optimizer))
    rule, rates = builder.recipe.update, Rates(optimizer)
    informs = attempt(runtime, lambda: goes_by_figures(session.job, rule, rates, strategy))
    if session.job.ema is not None:
        session.before_result = average_file(session, model).finish
    try:
        if session.role == "server":
            return _serve(session, builder, optimizer, about_this_run)
        if session.role == "aggregator":
            return _aggregate(session, builder)
        return _work(session, builder, local, optimizer, device, about_this_run, informs)
    finally:
        if model.lookups is not None:  # a job may have brought the module itself
            model.lookups.remove()


def about(
    session: Session, layout: Layout, optimizer: list[str], tables: Sequence[str] = ()
) -> dict[str, Any]:
    """What this run's checkpoints say of it."""
    names = [f"{name} {shape}" for name, shape in zip(layout.names, layout.shapes, strict=True)]
    found = about_run(session, [*names, *tables], session.strategy.family, optimizer)
    if server_strategy(session).reduces:
        found["workers"] = len(session.roles.workers)
    return found


def check_sums(session: Session) -> None:
    """Raise `UsageError` where a checkpoint's shards have not processed the same, so that some of them would have to
    leave out what others add, and their gradients come as sums."""
    if session.resume is None or not server_strategy(session).sums_on_nodes:
        return
    first, *others = processed_by(session.resume.servers(), session.catalogue.num_samples)
    if any(other != first for other in others):
        raise UsageError(
            f"{session.resume.folder}: its shards were cut at different pushes, so a push may be new to one shard "
            f"alone, and sums cannot be taken apart: leave aggregate out of {session.strategy} until a later checkpoint"
        )


def why_at_the_centre(resume: Checkpoint | None, strategy: ServerStrategy, rank: int) -> str:
    """Rank 0: what to say where elastic workers cannot go on from where they were; empty otherwise."""
    if resume is None or not strategy.elastic or rank != 0:
        return ""
    written = sorted(name for name in resume.parts if name.startswith("worker-"))
    if written and "parameters" in read_numbers(resume.folder, written[0], "replica", resume.identity):
        return ""
    return "the checkpoint holds none of the workers: all begin at the centre"


def server_strategy(session: Session) -> ServerStrategy:
    """The strategy in force, of the server family."""
    assert isinstance(session.strategy, ServerStrategy)
    return session.strategy


def average_file(session: Session, model: FlatModel) -> AverageFile:
    """Where the servers leave the moving average of the weights."""
    return AverageFile(session.run_dir, session.identity.attempt, model.module, model.layout)


def _serve(
    session: Session, builder: RoleBuilder, optimizer: Optimizer, about_this_run: dict[str, Any]
) -> RunOutcome:
    runtime, roles, strategy, model = session.runtime, session.roles, builder.strategy, builder.model
    shard = roles.servers.index(runtime.rank)
    store = attempt(runtime, lambda: builder.store(shard, optimizer))
    store.arrivals.adopt(model.wire_buffers[shard])  # the parameters live in the store from here on
    num_pushes = math.ceil(session.total_samples() / (session.job.step_samples * strategy.push_every))
    meter = Meter(session.report, num_warmup(num_pushes))
    own = _workers_hold_their_own(builder, optimizer)
    writers = roles.workers if own else (roles.validator,)
    writer = make_checkpoint_writer(
        session, f"shard-{shard}", about_this_run, lambda: {"store": store.state()}, writers
    )
    by_heartbeat = runtime.fault_tolerance == "heartbeat"
    floor_s = math.inf if strategy.needs_all else session.overrides.heartbeat_s
    server = builder.server(shard, store, meter, writer, floor_s, by_heartbeat)

    def restore() -> None:
        with restoring(session.resume):
            _restore_server(session, server, store, model.layout, shard)
        meter.go_on_from(server.counts.samples_accepted, server.counts.version)
        writer.try_out(server.state)

    attempt(runtime, restore)
    may_die = roles.workers if survives(runtime, strategy) and runtime.fault_tolerance == "ulfm" else ()
    emergency, why_not, role = shard_writer(session, server, store, writer, model.module)
    session.in_emergency(emergency, why_not)

    def buffer_for(source: int, kind: Kind) -> Any:
        return VariableBuffer() if kind in (Kind.DIVIDE, Kind.CLAIM) else store.wire_buffer()

    peers = (*roles.workers, *builder.others_of(shard))
    with recording(session.run_dir, shard) as order:
        counts = run_role(
            session, peers, buffer_for, record(role, order), ends=Ends(may_die, answer_late=server.turn_away),
            room_bytes=WAITING_BYTES,
        )  # fmt: skip
    trained = store.read(runtime.rank, full=True)
    assert isinstance(trained, FixedBuffer), "whole"
    model.install(shard, trained)
    trained.release()
    # one whose gradients were not finite has left in order
    runtime.evicted.update(int(rank) for rank, how in counts["lost"].items() if how != NOT_FINITE)
    counts["lost"] |= {str(rank): "died" for rank in runtime.evicted & runtime.dead()}
    if isinstance(store, TabledStore):
        save_tables(session.run_dir, shard, len(roles.servers), session.job.seed, model.module, store.tables)
    if store.updates.ema is not None:
        average_file(session, model).write_part(shard, store.updates.ema.values()[0])
    writer.wait()
    counts["checkpoints"] = writer.summary()
    counts |= store.statistics()
    counts["peak_waiting_buffers"] = store.pool.num_frames
    detail = {"rank": runtime.rank, "role": "server", "shard": shard, **counts}
    outcome = RunOutcome(detail, counts["failure"], server.checkpoints.ended, writer.unwritten)
    if runtime.rank == roles.dealer:
        outcome.result = {**meter.result(), **{key: counts[key] for key in _SHOWN}, **server.delivered}
    return outcome


def _workers_hold_their_own(builder: RoleBuilder, optimizer: Optimizer) -> bool:
    """Whether workers have state that no server has, beside the validator's running statistics: an optimizer, residuals
    or trained buffers, or hooks, which may change the optimizer's options."""
    strategy = builder.strategy
    coded = not strategy.push_codec.is_none
    hooked = bool(StepHooks(optimizer, ()))
    return strategy.optimizer == "worker" or coded or hooked or bool(trained_buffers(builder.model.module))


def _aggregate(session: Session, builder: RoleBuilder) -> RunOutcome:
    """Stand between this node's workers and the servers. Nothing of this rank belongs to a checkpoint."""
    session.in_emergency(None)
    for _ in ("the others build their shards and replicas", "they restore what they go on from"):
        attempt(session.runtime, lambda: None)
    buffers, aggregator = ByteBuffers(), builder.aggregator(session.place, signals.asked)
    peers = (*session.roles.servers, *session.roles.behind(session.place))
    counts = run_role(session, peers, lambda source, kind: buffers.empty(), aggregator.run())
    detail = {"role": "aggregator", **counts, "peak_waiting_buffers": buffers.num_buffers}
    return RunOutcome(detail)


def _restore_server(session: Session, server: Server, store: AnyStore, layout: Layout, shard: int) -> None:
    """As `restore_shard`, with what a schedule counts from."""
    role = restore_shard(session.resume, server, store, layout, shard)
    if role is not None:
        # shards are cut at pushes of their own, and all are to step at the same rates
        told = session.resume.servers()[0].get("figures") if session.resume else None
        go_on(session, server.pace, role | {"figures": told}, server.applied_samples)
        _limit(session, server, role.get("ticks"))
    report_end_of(session, server.pace)


def _limit(session: Session, server: Server, saved: dict[str, Any] | None) -> None:
    """Under `--steps`, where a step is of other workers or batches now: those that are left are of today's."""
    steps, dealer, ticks = session.overrides.steps, server.leases.dealer, server.pace.ticks
    assert ticks is not None, "of a job"
    if steps is None or dealer is None or saved is None or Law(*saved["law"]) == ticks.law:
        return
    left = max(0, steps - ticks.at(server.applied_samples))
    dealer.allow(left * session.strategy.num_replicas(len(session.roles.workers)))


def restore_shard(
    resume: Checkpoint | None, server: Server, store: AnyStore, layout: Layout, shard: int
) -> dict[str, Any] | None:
    """This shard's part, or, with another number of servers, all parts cut anew; counts then are those of the first.
    The dealing server looks at all parts, for shards are cut at pushes of their own. Returns the state of its role."""
    if resume is None:
        return None
    if resume.shards() == layout.num_shards:
        mine = read_own_part(resume, f"shard-{shard}")
    else:
        states = [read_own_part(resume, f"shard-{index}") for index in range(resume.shards())]
        before, (low, high) = layout.cut_into(len(states)).cuts, layout.cuts[shard : shard + 2]
        role = reshard_role([state["role"] for state in states], before, low, high, server.pace.epoch_samples)
        pieces = [num_row_pieces(state["role"]) for state in states]
        mine = {"role": role, "store": reshard([state["store"] for state in states], layout, shard, pieces)}
    store.restore(mine["store"])
    server.restore(mine["role"])
    if server.leases.dealer is not None:
        server.rejoin(resume.servers())
    return dict(mine["role"])


def _work(
    session: Session,
    builder: RoleBuilder,
    local: LocalSteps | None,
    optimizer: Optimizer,
    device: torch.device,
    about_this_run: dict[str, Any],
    informs: bool,
) -> RunOutcome:
    runtime, job, model = session.runtime, session.job, builder.model
    runtime.may_die_alone = not builder.strategy.needs_all
    with job.data.reader(session.catalogue, job.seed) as reader:
        # on every worker: any may have to take over
        validations = session.validations(informs=informs)
        measure = make_measure(job, model.module, session.validation, device, runtime.stamp, validations)
        index = session.roles.workers.index(runtime.rank)
        replica = attempt(runtime, lambda: builder.replica(runtime.rank, optimizer, local, reader))
        writer = make_checkpoint_writer(
            session, f"worker-{index}", about_this_run, lambda: {"replica": replica.state()}
        )
        measures = measured_by_workers(replica, measure, builder.num_workers) if measure else None
        duties = Duties(writer, lambda: save_final(session, replica), validations, measures)
        worker = builder.worker(runtime.rank, replica, session.report, duties, heartbeat_s(session))
        attempt_restore(session, worker, replica, index)
        watched = session.overrides.watchdog_s > 0
        emergency, role = worker_writer(writer, worker, model.module, watched)
        session.in_emergency(emergency)
        straggler = session.straggler()
        workers_sum = runtime.sum_among(session.roles.workers) if builder.strategy.reduces else None
        counts = run_role(
            session,
            session.roles.servers,
            builder.buffer_for,
            straggler.wrap(role),
            computer=compute_thread(device) if builder.strategy.inflight > 1 else None,
            workers_sum=workers_sum,
        )
        if workers_sum is not None:
            workers_sum.close()
    replica.finish()
    writer.wait()
    codec = {"codec": replica.statistics()} if replica.coder else {}
    detail = {"role": "worker", **counts, **codec, "checkpoints": writer.summary()}
    return RunOutcome(detail, unwritten=writer.unwritten, injected=straggler.counts())


def attempt_restore(session: Session, worker: Worker, replica: Replica, index: int) -> None:
    """This worker's part, where the checkpoint has one; parameters and leases come from the servers."""
    number = len(session.roles.workers)
    strategy = server_strategy(session)

    def restore() -> None:
        with restoring(session.resume):
            restore_worker(session.resume, worker, replica, index, number, strategy)
            _restore_ticks(session, replica, worker)
        if worker.writer is not None:
            worker.writer.try_out(worker.state)

    attempt(session.runtime, restore)


def _restore_ticks(session: Session, replica: Replica, worker: Worker) -> None:
    """What a schedule on the worker counts from and which figures were heard, as the dealing server's part says."""
    if session.resume is None:
        return
    role = session.resume.servers()[0]
    counted = [replica.local.pace] if replica.local is not None else []
    counted += [replica.reduced.updates.pace] if isinstance(replica, HybridReplica) else []
    for pace in counted:  # of what changes the server tells
        go_on(session, Pace(ticks=pace.ticks), role, role["applied_samples"])
        pace.hear_figures(json.dumps(role.get("figures", ())))
    worker.validations.go_on_from(role.get("figures"))


def restore_worker(
    resume: Checkpoint | None, worker: Worker, replica: Replica, index: int, num_workers: int,
    strategy: ServerStrategy,
) -> dict[str, Any] | None:  # fmt: skip
    """What worker number `index` goes on from; returns its part, or, where it was not there before, the first one."""
    if resume is None:
        return None
    read = functools.lru_cache(maxsize=2)(functools.partial(read_own_part, resume))
    mine = read(f"worker-{index}")
    if mine is not None:
        worker.restore(mine["role"])
        replica.restore(mine["replica"])
    elif (first := read("worker-0")) is not None:  # a worker that was not there before
        replica.restore_buffers(first["replica"])
        if replica.server_steps is not None:
            replica.server_steps.restore(first["replica"].get("remote"))
    if isinstance(replica, HybridReplica):  # all workers held the same
        replica.restore_reduced(read("worker-0")["replica"])
    if replica.coder is not None and same_codec(resume.about, strategy, "push_wire"):
        written = sorted(int(name.split("-")[1]) for name in resume.parts if name.startswith("worker-"))
        replica.coder.restore(*_kept_by_workers(read, written, index, num_workers))
    went_on_from: dict[str, Any] | None = mine if mine is not None else read("worker-0")
    return went_on_from


def _kept_by_workers(
    read: Callable[[str], Any], written: Sequence[int], index: int, num_workers: int
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """The residuals of the workers' codecs: those that fall to this worker (of the workers that wrote, the index-th,
    the one `num_workers` after it, and so on), and the state of one that holds what all share: this worker's own while
    their number is the same, or the first one's."""

    def kept(worker: int) -> Any:
        part = read(f"worker-{worker}")
        return part["replica"].get("coder") if part else None

    mine = [state for worker in written if worker % num_workers == index and (state := kept(worker))]
    if mine and len(written) == num_workers:
        return mine, mine[0]
    return mine, kept(written[0]) if written else None


# ---- Running one rank's role of a run over parameter servers.
#
# Invariants: this file knows what differs between launches that survive a death, and nothing of what the roles do.


def heartbeat_s(session: Session) -> float:
    """How long anybody may be silent where MPI reports no death; 0 where it does, or the launcher ends the job."""
    if session.runtime.fault_tolerance != "heartbeat":
        return 0.0
    return session.overrides.heartbeat_s or MID_SILENCE_S


def run_role(
    session: Session, peers: tuple[int, ...], buffer_for: Any, role: Role,
    computer: Executor | None = None, workers_sum: Any = None, ends: Ends = Ends(),  # noqa: B008 - frozen
    room_bytes: float = math.inf,
) -> Any:  # fmt: skip
    """Run `role` among `peers` and return what it returned; the arguments are those of `MpiWorld`;
    `workers_sum`: of a role that all-reduces. Peers behind an aggregator are reached through it.

    Where MPI would not report the failure of a worker, the worker reports it to its servers before the error goes on.
    """
    runtime, routes = session.runtime, session.roles.routes(session.place)
    role = bundled(role, session.place, routes, serves=session.role == "server")
    peers = tuple(dict.fromkeys(routes.get(peer, peer) for peer in peers))

    def on_step(step: int) -> None:
        runtime.step = step

    timeout_s = heartbeat_s(session)
    world = runtime.make_world(
        peers,
        buffer_for,
        on_step=on_step,
        computer=computer,
        ends=ends._replace(leave_s=timeout_s or None),
        reduce=workers_sum,
        begin=workers_sum.begin if workers_sum is not None else None,
        room_bytes=room_bytes,
    )
    session.end_listening = world.close
    try:
        returned = world.run(role)
    except Exception as error:
        if timeout_s and session.role == "worker" and not isinstance(error, LostRankError | EvictedError):
            with contextlib.suppress(Exception):  # the error that came first is the one to report
                world.advance(report_failure(peers), None)
        raise
    if timeout_s:
        runtime.may_die_alone = False  # from here on nobody would notice
    return returned
