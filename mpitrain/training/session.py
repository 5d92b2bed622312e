"""The session: what every run has, whatever its strategy. An agreed start, roles, data, a run directory and an agreed
end.

Invariants: before the first step all ranks have loaded the same job with the same options and found the same
parameters, or all leave together with one message. Rank 0 alone reads the shards' sizes and broadcasts them. At the end
every rank sends its counts to rank 0, which writes `result.json` last, and all ranks leave with the same exit code.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from mpitrain.checkpoint import Checkpoint
from mpitrain.data import Catalogue
from mpitrain.data.preflight import look
from mpitrain.data.read.reader import Source
from mpitrain.devices import accelerator
from mpitrain.errors import EXIT_REQUEUE, AgreedError, UsageError
from mpitrain.inject import Straggler
from mpitrain.job import Job, Overrides, apply_overrides
from mpitrain.reporting.environment import code_places, code_versions, collect
from mpitrain.reporting.listeners import read_logs
from mpitrain.reporting.report import NullReport, Report, Reported, report_end, set_aside, write_json, writing
from mpitrain.strategies.base import Strategy
from mpitrain.strategies.checkpoint_policy import read_policy
from mpitrain.strategies.features import LOOP, why_not
from mpitrain.strategies.parameter_server.staleness import disagreement
from mpitrain.strategies.placement import Roles, assign
from mpitrain.strategies.validation_policy import ValidationPolicy, read_validation_policy
from mpitrain.system import trace
from mpitrain.system.files.error_record import forget_reports
from mpitrain.system.files.folders import make_private
from mpitrain.system.files.run_directory import NO_PROGRESS, RUN_FILE, RUN_SCHEMA, Identity, progress
from mpitrain.system.files.run_lock import RunLock
from mpitrain.system.launched import rank_status
from mpitrain.system.launched.launch_variables import launched_server_nodes
from mpitrain.system.launched.ranks import Ranks
from mpitrain.system.memory import peak_bytes
from mpitrain.system.optional import optional
from mpitrain.training import signals
from mpitrain.training.accounting import Account
from mpitrain.training.agree import attempt as attempt
from mpitrain.training.fault_tolerance import check_aggregated, level, may_miss, warning
from mpitrain.training.injected import Injected
from mpitrain.training.measure import device_for, pick_device
from mpitrain.training.mllog_facts import mllog_facts
from mpitrain.training.open_run import open_run
from mpitrain.training.outcome import RunOutcome, rows_of, without_rows
from mpitrain.training.payloads import settle_payloads
from mpitrain.training.resuming.about_data import about_data
from mpitrain.training.resuming.fingerprint import contents_of, of_job_file, of_program, options
from mpitrain.training.tracing import begin_trace, nothing_traced
from mpitrain.training.validate import check_precision, validate_run
from mpitrain.training.validations.best_model import Validations
from mpitrain.training.validations.judge import NOBODY_LEFT, judge

if TYPE_CHECKING:
    from mpitrain.mpi.runtime import Runtime
    from mpitrain.training.watchdog.emergency import Emergency

REQUEUE_FILE = "REQUEUE"  # is there when the run wants to be started again with --resume auto


@dataclasses.dataclass
class Session:
    """One run on one rank; `prepare` makes it. Other modules change it by its methods alone.

    Attributes:
        place: this rank's number when the run began; should other ranks die, it may get another.
        report: of rank 0; the other ranks report nothing. lock: of the run directory, on rank 0.
        contents: see `fingerprint.contents_of`. about_data: on rank 0, what the result says of the data.
        account: what this start and those before it have cost.
        before_result: is called on rank 0 when all ranks have come to the end.
        end_listening: to ranks that were given up and come back late; until then they are answered.
        leg: on rank 0, which start of the run this is, of those that went on from a checkpoint; the first is 1.
        injected: what `--inject` orders.
        emergency: what would write this rank's part if the run stood still; why_no_emergency: why nothing would, empty
            where this rank has nothing of its own to write.
    """

    runtime: Ranks
    job: Job
    overrides: Overrides
    roles: Roles
    catalogue: Catalogue
    validation: Catalogue | None
    run_dir: Path
    report: Report | NullReport
    started_s: float
    place: int
    identity: Identity
    resume: Checkpoint | None = None
    lock: RunLock | None = None
    contents: dict[str, str] = dataclasses.field(default_factory=dict)
    about_data: dict[str, Any] = dataclasses.field(default_factory=dict)
    emergency: Emergency | None = None
    why_no_emergency: str = "the run had not begun"
    account: Account | None = None
    before_result: Callable[[], None] = lambda: None
    end_listening: Callable[[], None] = lambda: None
    leg: int = 1
    injected: Injected | None = None

    @property
    def mpi(self) -> Runtime:
        """The same as `runtime`, for what needs MPI itself."""
        return cast("Runtime", self.runtime)

    @property
    def strategy(self) -> Strategy:
        """The strategy in force."""
        return self.job.run_strategy

    @property
    def role(self) -> str:
        """This rank's role: "server", "aggregator", "worker" or "peer"."""
        return self.roles.of(self.place)

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        if self.role in ("server", "aggregator"):
            return torch.device("cpu")
        return pick_device(self.job, self.runtime.local_rank)

    @property
    def gpu(self) -> str | None:
        """What the GPU is called on which this rank computes."""
        device = self.device
        return accelerator.name_of(device) if accelerator.computes(device) else None

    def in_emergency(self, writer: Emergency | None, why_not: str = "") -> None:
        """From here on this writes this rank's part when the run stands still, or nothing does: see the attributes."""
        self.emergency, self.why_no_emergency = writer, why_not

    def straggler(self) -> Straggler:
        """What is ordered for this worker."""
        assert self.injected is not None, "the run has begun"
        return self.injected.straggler(self.roles.workers.index(self.place))

    def lead(self) -> None:
        """Make this rank the first: it takes the run directory's lock, and reports."""
        self.lock = RunLock(self.run_dir, self.identity.attempt)
        self.lock.take()
        assert self.account is not None, "the run has begun"
        self.account.lead()
        self.open_report(None)

    def close(self) -> None:
        """Release the run directory, so that other jobs may take it."""
        if self.account is not None:
            self.account.close()
        if self.lock is not None:
            self.lock.release()

    def open_report(self, resumed_at: int | None, job_file: str | None = None) -> None:
        """Begin to report on this rank; `resumed_at`: as for a `Report`; `job_file`: that the run is started from."""
        job = self.job
        reported = Reported(
            self.run_dir, self.total_samples(), quiet=self.overrides.quiet, num_epochs=job.epochs,
            resumed_at=resumed_at, log_every=job.log_every, logs=read_logs(job.log), callbacks=job.callbacks,
            facts=mllog_facts(job, self.overrides.lr, self.validation, job_file),
            spent=self.account.spent if self.account else None,
        )  # fmt: skip
        self.report = Report(reported)

    def validations(self, steps_end_it: bool = False, informs: bool = False) -> Validations:
        """When this run validates, and what follows. `steps_end_it`: under `--steps` the final model alone is
        validated, where the job says nothing else. `informs`: a scheduler goes by what is measured."""
        job = self.job
        policy = read_validation_policy(job.validate_every)
        if steps_end_it and self.overrides.steps is not None and job.validate_every is None:
            policy = ValidationPolicy()
        return Validations(job, self.run_dir, policy, informs=informs)

    def num_batches(self) -> int | None:
        """Batches in the whole run where `--steps` limits it: so many for every worker that takes its own."""
        shares = self.strategy.num_replicas(len(self.roles.workers))
        return None if self.overrides.steps is None else self.overrides.steps * shares

    def total_samples(self) -> int:
        """Samples the run will take, for the progress line."""
        batches = self.num_batches()
        planned = self.catalogue.num_samples * self.job.epochs
        return planned if batches is None else batches * self.job.step_samples

    def finish(self, outcome: RunOutcome) -> dict[str, Any]:
        """Gather every rank's `outcome`, judge the run, write `result.json` and print the FOM line on rank
        0; returns the result, with the rows of all ranks on rank 0, and with a rank's own elsewhere.
        """
        outcome.traced_steps = trace.finish()
        outcome.account = self.account.counted() if self.account else {}
        if self.runtime.num_threads is None and (most := peak_bytes()):
            outcome.detail["peak_bytes"] = most
        outcome.device = "" if self.role in ("server", "aggregator") else self.device.type

        # where ranks may be lost: messages from those that answer, no collective
        living = may_miss(self.runtime, self.strategy)
        told = vars(outcome)
        rows = self._gather_living(told) if living else self.runtime.gather(told)
        result = None
        if rows is not None:
            gathered = [RunOutcome(**row) for row in rows]
            self.before_result()
            result = result_of(self, gathered)
            if self.account:
                lost = bool(self.runtime.lost or self.runtime.evicted)
                result |= self.account.end([one.account for one in gathered], result["wall_s"], lost)
            if self.job.trace is not None and not any(one.traced_steps for one in gathered):
                self.report.event("warning", text=nothing_traced(self.job.trace))
            report_end(self.report, result)
            self._report_last_checkpoint(result)
            requeue = self.run_dir / REQUEUE_FILE
            if result["exit_code"] == EXIT_REQUEUE:
                with writing(requeue):
                    make_private(self.run_dir)
                    requeue.write_text(f"{result['samples']}\n")
            else:
                with optional(requeue):
                    requeue.unlink(missing_ok=True)
            self.report.finish(result)
        share = self.runtime.broadcast_living if living else self.runtime.broadcast
        shared = share(without_rows(result) if result is not None else None)
        self.end_listening()
        return result if result is not None else {**shared, **rows_of([outcome])}

    def _report_last_checkpoint(self, result: dict[str, Any]) -> None:
        """Where a run that has come to its end has left none of that to go on from."""
        if result["status"] not in ("ok", "missed"):
            return
        found = progress(self.run_dir)
        if found == NO_PROGRESS:
            never = read_policy(self.job.checkpoint_every, self.job.mtbf_s).is_never
            reason = f"checkpoint_every={self.job.checkpoint_every!r}" if never else "none could be written"
            self.report.event("no checkpoint", reason=f"{reason}, so more epochs would begin anew")
        elif found.samples < result["samples"]:
            of = f"{found.samples} of {result['samples']}"
            self.report.event("newest checkpoint", samples=of, reason="more epochs go on from there")

    def _gather_living(self, told: dict[str, Any]) -> list[dict[str, Any]] | None:
        gathered = self.runtime.gather_living(told)
        return None if gathered is None else [gathered[rank] for rank in sorted(gathered)]


def prepare(
    runtime: Ranks, make_job: Callable[[], Job], overrides: Overrides, job_file: str | None = None
) -> Session:
    """Bring all ranks to the same start line.

    Raises:
        AgreedError: something is wrong on some rank; rank 0 has reported it.
    """
    started_s = time.monotonic()
    job = attempt(runtime, lambda: apply_overrides(make_job(), overrides))
    strategy = job.run_strategy
    injections = [str(one) for one in overrides.injections]
    asked = {"lr": overrides.lr, "steps": overrides.steps, "inject": injections}
    runtime.compare({**_versions_by_node(runtime), **options(job), **asked})
    roles = attempt(runtime, lambda: assign_roles(runtime, strategy))
    attempt(runtime, lambda: validate_run(job, overrides, len(roles.workers)))
    runtime.role = roles.of(runtime.rank)
    attempt(runtime, lambda: _check_device(job, runtime))
    catalogue = _scan(runtime, job.data)
    validation = None if job.validate is None else _scan(runtime, job.validate)
    attempt(runtime, lambda: _enough_samples(catalogue.num_samples, roles))
    contents: dict[str, str] = runtime.broadcast(
        attempt(runtime, lambda: contents_of(catalogue) if runtime.rank == 0 else None)
    )
    about = attempt(
        runtime, lambda: {} if runtime.rank else about_data(job, overrides, catalogue, validation)
    )
    opened = open_run(runtime, job, overrides, roles)
    runtime.run_dir = run_dir = opened.run_dir
    session = Session(
        runtime, job, overrides, roles, catalogue, validation, run_dir, NullReport(), started_s, runtime.rank,
        opened.identity, opened.resume, opened.lock, contents, about, leg=opened.leg,
    )  # fmt: skip
    settle_payloads(runtime, overrides, session.resume)
    environment = runtime.gather(
        {"rank": runtime.rank, "role": session.role, "node": runtime.nodes[runtime.rank], "gpu": session.gpu}
    )
    account = session.account = Account(runtime, run_dir, opened.identity.attempt)
    source = session.resume.folder.parent.parent if session.resume else None
    attempt(runtime, lambda: account.begin(source, _resumed_at(session), job_file is not None))
    session.injected = attempt(
        runtime, lambda: Injected(runtime, job, overrides, len(roles.workers), run_dir)
    )
    attempt(
        runtime, lambda: session.open_report(_resumed_at(session), job_file) if runtime.rank == 0 else None
    )
    if runtime.rank == 0:
        forget_reports(run_dir)
        text = json.dumps({**collect(runtime), "ranks": environment}, indent=2, sort_keys=True, default=str)
        with writing(run_dir / "env.json"):
            set_aside(run_dir / "env.json")
            (run_dir / "env.json").write_text(text + "\n")
        write_json(run_dir / RUN_FILE, _how_started(session, job_file))
        _describe_start(session)
        _describe_data(session)
        for name, fields in opened.events:
            session.report.event(name, **fields)
    begin_trace(runtime, job, session.role, run_dir)
    signals.install()
    return session


def _resumed_at(session: Session) -> int:
    """Accepted samples from which the run goes on; the checkpoint itself may be gone by the end."""
    source = session.identity.resumed_from
    return int(source["samples"]) if source else 0


def begin(runtime: Ranks) -> None:
    """The start-up is over.

    Raises:
        AgreedError: the launch has asked for an end meanwhile. It may count on no step being made then, and end us.
    """
    rank_status.reach(rank_status.READY)
    if runtime.broadcast(rank_status.stop_requested(now=runtime.rank == 0)):
        raise AgreedError("the launch was asked to end before the first step of this run", EXIT_REQUEUE)


def _versions_by_node(runtime: Ranks) -> dict[str, str | None]:
    """`code_versions`, which reads all sources of the package: looked up by one rank of a node, and by ranks that run
    other files than that one."""
    is_first, places = runtime.nodes.index(runtime.nodes[runtime.rank]) == runtime.rank, code_places()
    found = runtime.from_first_of_node([places, code_versions()] if is_first else None)
    return dict(found[1]) if found[0] == places else code_versions()


def _check_device(job: Job, runtime: Ranks) -> None:
    if runtime.role not in ("server", "aggregator"):
        check_precision(job, device_for(job, runtime.local_rank))


def _scan(runtime: Ranks, source: Source) -> Catalogue:
    """The source's catalogue: rank 0 scans and broadcasts it, so the file system is read once for all ranks."""
    catalogue: Catalogue | None = attempt(runtime, lambda: source.scan() if runtime.rank == 0 else None)
    text = runtime.broadcast(catalogue.to_json() if catalogue is not None else None)
    return Catalogue.from_json(text)


def assign_roles(runtime: Ranks, strategy: Strategy, own_loop: bool = False) -> Roles:
    """Everybody's role, if this strategy can run with so many workers (and, in somebody's own loop, without epochs)."""
    for feature in ("own loop", "over MPI") if own_loop else ():
        if why := why_not(feature, strategy, LOOP):
            raise UsageError(f"{strategy}: {why}")
    roles = assign(
        runtime.nodes,
        strategy.num_servers(),
        strategy.placement,
        launched_server_nodes(),
        strategy.aggregates,
    )
    strategy.check_workers(len(roles.workers))
    check_aggregated(runtime, strategy)
    return roles


def _enough_samples(num_samples: int, roles: Roles) -> None:
    if num_samples < len(roles.workers):
        raise UsageError(
            f"{len(roles.workers)} workers for {num_samples} training samples: start at most {num_samples} workers"
        )


def _how_started(session: Session, job_file: str | None) -> dict[str, Any]:
    """What `simulate --replay` needs to start the same run."""
    init = session.overrides.init
    return {
        "schema": RUN_SCHEMA,
        **session.identity._asdict(),
        "leg": session.leg,
        "strategy_asked": session.overrides.strategy or str(session.strategy),
        **of_job_file(job_file),
        **(of_program(session.job) if job_file is None else {}),
        "overrides": dataclasses.asdict(session.overrides)
        | {"strategy": str(session.strategy), "run_dir": None, "init": init and str(Path(init).resolve())},
        "options": dict(session.job.options),
        "target": dict(session.job.target or {}),
        "servers": list(session.roles.servers),
        "workers": list(session.roles.workers),
        "aggregators": dict(zip(session.roles.aggregators, session.roles.members, strict=True)),
        "num_threads": torch.get_num_threads(),
        **_threads(session),
    }


def _aggregators(session: Session) -> dict[str, int]:
    """How many there are, where there are any."""
    number = len(session.roles.aggregators)
    return {"aggregators": number} if number else {}


def _threads(session: Session) -> dict[str, int]:
    """How many replicas are threads of one process, where they are."""
    number = session.runtime.num_threads
    return {} if number is None else {"threads": number}


def _describe_data(session: Session) -> None:
    """What the samples are like, which one rank finds out for all, and what is surprising about them."""
    job = session.job
    found = [("train", look(job.data, session.catalogue))]
    if job.validate is not None and session.validation is not None and job.validate is not job.data:
        found.append(("validate", look(job.validate, session.validation)))
    for what, seen in found:
        unseen = {"why_not": seen.unseen} if seen.unseen else {}
        session.report.event(
            "data", of=what, samples=seen.num_samples, files=seen.num_files, looked_at=seen.looked_at, **unseen,
            arrays="; ".join(seen.lines()),
        )  # fmt: skip
        for text in seen.warnings():
            session.report.event("warning", text=f"data of {what}: {text}")


def _describe_start(session: Session) -> None:
    session.report.event(
        "start", job=session.job.name, strategy=str(session.strategy), workers=len(session.roles.workers),
        servers=len(session.roles.servers), **_aggregators(session), samples=session.catalogue.num_samples,
        batch_size=session.job.batch_size, accumulate=session.job.accumulate, run_dir=str(session.run_dir),
        fault_tolerance=level(session.runtime, session.strategy), **_threads(session),
    )  # fmt: skip
    if text := warning(session.runtime, session.strategy):
        session.report.event("warning", text=text)
    counted = [
        one for one in session.overrides.injections if hasattr(one, "at_step") or hasattr(one, "at_write")
    ]
    if session.resume is not None and counted:
        again = " ".join(map(str, counted))
        text = (
            f"--inject {again} counts from this start on, and fires again, as it may have in the one before"
        )
        session.report.event("warning", text=text)


def result_of(session: Session, gathered: list[RunOutcome]) -> dict[str, Any]:
    """Put the ranks' outcomes together: figures, validation metrics, and whether the run did what it was
    asked to.
    """
    merged: dict[str, Any] = {}
    for outcome in gathered:
        merged |= outcome.result or {}
    if "metrics" not in merged:
        merged |= {"metrics": {}, "model": None}
        gathered = [*gathered, RunOutcome({}, NOBODY_LEFT)]
    failures = sorted(
        filter(None, [*(outcome.failure for outcome in gathered), merged.get("failure")]),
        key=lambda text: not text.startswith("rank"),
    )
    ended = any(outcome.requeue for outcome in gathered)
    since = merged.get("best", {}).get("validations_since", 0)
    early = ended and session.job.patience is not None and since >= session.job.patience
    requeue = ended and not early
    if requeue and not failures:  # to run again takes a checkpoint, the last one
        failures = [outcome.unwritten for outcome in gathered if outcome.unwritten]
    shards = [outcome.detail for outcome in gathered if outcome.detail.get("role") == "server"]
    if not failures and not ended and (differs := disagreement(shards)):
        failures = [differs]
    resume = session.resume
    return {
        **merged,
        **judge(session.job, merged["metrics"], failures, session.overrides, requeue),
        **session.about_data,
        "workers": len(session.roles.workers),
        "servers": len(session.roles.servers),
        **_aggregators(session),
        "nodes": session.runtime.num_nodes,
        "device": "+".join(sorted({outcome.device for outcome in gathered} - {""})),
        "leg": session.leg,
        "run_dir": str(session.run_dir),
        "run": session.identity.run,
        "attempt": session.identity.attempt,
        "ended_early": early,
        "resumed_from": _resumed_at(session) if resume else None,
        "resumed_run": resume.identity.run if resume else None,
        "fault_tolerance": level(session.runtime, session.strategy),
        **rows_of(gathered),
        "wall_s": time.monotonic() - session.started_s,
        **_threads(session),
    }
