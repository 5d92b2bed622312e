"""`mpitrain plan JOB`: what a job would do on a machine, on one worker, two, four and so on, before it is submitted.

Invariants: without `--probe` nothing is timed, and equal inputs give equal bytes. What was not given is either named
and refused, or printed as an assumption.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from mpitrain.data.format.catalogue import Catalogue
from mpitrain.errors import EXIT_OK, UsageError
from mpitrain.job import Job, Overrides, apply_overrides
from mpitrain.planning.advice import (
    Option,
    advise,
    candidates,
    check_criterion,
    merged,
    option,
    rank,
    virtual_candidates,
)
from mpitrain.planning.codecs import message_sizes
from mpitrain.planning.curves import curve
from mpitrain.planning.link_probe import probe_link
from mpitrain.planning.plan_text import plan_text
from mpitrain.planning.probe import Probed, Weights, probe, weigh
from mpitrain.planning.probe_interval import add_intervals, calm, is_loaded
from mpitrain.planning.scaling import (
    Conditions,
    Setting,
    Times,
    throughput,
)
from mpitrain.planning.virtual_runs import (
    VirtualRuns,
    rank_trained,
    setting_with_rows,
    virtual_setting,
    with_rows,
)
from mpitrain.strategies.allreduce import AllReduce
from mpitrain.strategies.base import ServerStrategy, Strategy, read_strategy
from mpitrain.strategies.local_sgd import LocalSGD
from mpitrain.strategies.parameter_server.asynchronous import Async
from mpitrain.strategies.parameter_server.batch_size import PerWorker
from mpitrain.strategies.parameter_server.sync import Backup, Sync
from mpitrain.system.files.atomic import check_output, durably_replaced
from mpitrain.system.launched.launch_variables import launched_rank, launched_size
from mpitrain.system.saying import say, tell
from mpitrain.training.job_file import load_job
from mpitrain.values import parse
from mpitrain.virtual.compute import ComputeLaw
from mpitrain.virtual.link_costs import link_cost
from mpitrain.virtual.message_law import LinkCost
from mpitrain.virtual.network import Cluster, MeasuredNetwork, NetworkLaw

MACHINE_KEYS: dict[str, type] = {"nodes": int, "ranks_per_node": int, "memory_gib": float, "network": str}

_ADAPTIVE = ("Adam", "RMSprop", "Adagrad", "Adadelta")  # in the name of an optimizer's class
GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Request:
    """What the command line asks.

    Attributes:
        workers: numbers of workers; none: powers of two up to the machine's.
        budget_s: of the probe; None: no probe.
        apply_s, push_s, read_s, fixed, backward: as in `Conditions`; start_s: of a rank; None: not given.
        train: how many of the best settings are trained in virtual time.
    """

    path: str
    overrides: Overrides = Overrides()
    settings: Sequence[str] = ()
    workers: Sequence[int] = ()
    strategies: Sequence[str] = ()
    budget_s: float | None = None
    compute: str | None = None
    network: str | None = None
    machine: str | None = None
    nodes: int | None = None
    ranks_per_node: int | None = None
    memory_gib: float | None = None
    apply_s: float | None = None
    push_s: float | None = None
    read_s: float | None = None
    fixed: float | None = None
    backward: float | None = None
    start_s: float | None = None
    best: str | None = None
    train: int = 0
    json: str | None = None


def plan_command(request: Request) -> int:
    """`mpitrain plan`: prints the plan; returns the exit code. In a launch the first rank does so, and all measure the
    link between their nodes, where there is a probe and nobody says the network."""
    check_output(request.json, "--json")
    request = _with_machine(request)
    if request.network is None and request.budget_s is not None and launched_size() not in (None, 1):
        request = dataclasses.replace(request, network=probe_link())
    if launched_rank() != 0:
        return EXIT_OK
    found = make_plan(request)
    say(plan_text(found))
    if request.json:
        with durably_replaced(Path(request.json)) as temporary:
            temporary.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return EXIT_OK


def make_plan(request: Request) -> dict[str, Any]:
    """The whole plan, as `--json` writes it.

    Raises:
        UsageError: something is missing, or contradicts itself.
    """
    within_s = check_criterion(request.best) if request.best else None
    request = _with_machine(request)
    _check_given(request)
    job = _job_of(request)
    catalogue = job.data.scan()
    weights, module, optimizer = weigh(job, catalogue)
    probed = None
    if request.budget_s is not None:
        tell(f"probing this host for about {request.budget_s:g} s")
        probed = probe(job, request.overrides.lr, catalogue, request.budget_s)
    conditions, assumed = _conditions(request, job, weights, probed)
    runs = VirtualRuns(job, request.overrides)
    settings = _settings(request, module, weights, runs)
    assumed += _drawn(conditions.times, max(_counts(request)), settings)
    if any(one.kind == "virtual" for one in settings) or (request.best and not request.strategies):
        assumed.append(
            "what has no closed form ran a few steps in virtual time, servers where it places them"
        )
    counts = _counts(request)
    curves = [curve(one, conditions, counts, job.batch_size) for one in settings]
    start_s = _start_s(request, probed, assumed)
    quiet = calm(conditions, probed) if probed else None
    if quiet:
        add_intervals(curves, settings, quiet)
    of = _Planned(
        request, job, catalogue, optimizer, weights, conditions, runs, within_s, start_s, quiet, is_loaded(probed)
    )  # fmt: skip
    asked = settings if request.strategies or not request.best else None
    options = _options(of, counts, asked)
    found: dict[str, Any] = {
        "job": job.name,
        "batch": job.batch_size,
        "samples": catalogue.num_samples,
        "epochs": job.epochs,
        "workers": counts,
        "one_device_samples_per_s": throughput(Setting("", "allreduce"), conditions, 1),
        "bytes": dataclasses.asdict(weights) | {"rank": weights.rank_bytes()},
        "curves": curves,
        "assumptions": assumed,
        "advice": _advice(of, options),
    }
    if probed:
        found["probe"] = dataclasses.asdict(probed) | {"network": request.network}
    if request.best:
        ranked = merged(rank(options, request.best), request.best)
        found["best"] = {"criterion": request.best, "options": [_row(one) for one in ranked]}
        if request.train:
            found["best"] |= _trained(of, ranked)
    return found


def _job_of(request: Request) -> Job:
    job = apply_overrides(load_job(request.path, request.settings), request.overrides)
    if request.train and job.validate is None:
        raise UsageError(
            f"plan: --train ranks by a validation, and the job {job.name!r} validates nothing: give it validate="
        )
    return job


@dataclasses.dataclass(frozen=True)
class _Planned:
    """What is planned: the job on the machine of a request. `within_s`: the time that --best names, if any; `start_s`:
    of a rank that has a core to itself; `calm`: the conditions of a host that nobody else uses, and `loaded`: whether
    this one was used by others, where there was a probe."""

    request: Request
    job: Job
    catalogue: Catalogue
    optimizer: Any
    weights: Weights
    conditions: Conditions
    runs: VirtualRuns
    within_s: float | None
    start_s: float = 0.0
    calm: Conditions | None = None
    loaded: bool = False


def _trained(of: _Planned, ranked: Sequence[Option]) -> dict[str, Any]:
    """The first options, trained in virtual time; one device is among them as `allreduce()` on one worker."""
    lr = float(of.optimizer.param_groups[0]["lr"]) if "lr" in of.optimizer.param_groups[0] else None
    settings = []
    for one in ranked[: of.request.train]:
        strategy = read_strategy(one.text if one.setting else "allreduce()")
        changed = None if lr is None or one.lr_factor == 1 else lr * one.lr_factor
        tell(f"training in virtual time: {one.text} on {one.workers} workers")
        settings.append((strategy, one.workers, changed))
    choice, rows = of.runs.train(settings, of.conditions, of.within_s)
    best = rank_trained(rows, choice, of.request.best or "")
    return {"metric": choice.metric, "trained": [one._asdict() for one in best]}


def _with_machine(request: Request) -> Request:
    """What the machine's file says, where the command line does not."""
    if not request.machine:
        return request
    try:
        found = tomllib.loads(Path(request.machine).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--machine {request.machine}: {error}") from error
    changes: dict[str, Any] = {}
    for key, value in found.items():
        wanted = MACHINE_KEYS.get(key)
        if wanted is None:
            raise UsageError(f"--machine {request.machine}: no {key!r} among {', '.join(MACHINE_KEYS)}")
        if isinstance(value, bool) or not isinstance(value, (int, float) if wanted is float else wanted):
            raise UsageError(f"--machine {request.machine}: {key} must be {wanted.__name__}, got {value!r}")
        if isinstance(value, int | float) and value <= 0:
            raise UsageError(f"--machine {request.machine}: {key} must be greater than 0")
        if getattr(request, key) is None:
            changes[key] = value
    return dataclasses.replace(request, **changes)


def _check_given(request: Request) -> None:
    if request.train and not request.best:
        raise UsageError("plan: --train trains the best settings: say by what they are the best, with --best")
    missing = []
    if request.compute is None and request.budget_s is None:
        missing.append('how long a batch takes (--compute "constant(0.1)", or --probe)')
    if request.network is None:
        missing.append(
            'the network (--network "gbe10()", or network = "gbe10()" in --machine FILE, or a launch of --probe on two '
            "nodes or more)"
        )
    if not request.workers and request.nodes is None:
        missing.append("the numbers of workers (--workers 1,2,4,8, or --nodes)")
    if missing:
        raise UsageError("plan: missing " + "; ".join(missing))
    per_node = request.ranks_per_node or 1
    if request.nodes is not None and max(request.workers, default=1) > request.nodes * per_node:
        raise UsageError(
            f"plan: {max(request.workers)} workers on {request.nodes} nodes of {per_node}: use fewer, or say the "
            "machine's --nodes and --ranks-per-node"
        )
    law, most = _network_law(request), max(request.workers, default=(request.nodes or 1) * per_node)
    placed = min(law.ranks_per_node, most) if isinstance(law, Cluster) else 1
    if placed != 1 and placed != min(per_node, most):
        raise UsageError(
            f"plan: --network {request.network} puts {placed} ranks on a node, and --ranks-per-node {per_node}: say "
            "the same with both"
        )


def _counts(request: Request) -> list[int]:
    if request.workers:
        return sorted(set(request.workers))
    most = (request.nodes or 1) * (request.ranks_per_node or 1)
    return [1 << power for power in range(most.bit_length())]


def _network_law(request: Request) -> NetworkLaw:
    """The network; of a measured one, the cluster that was measured."""
    law = parse(request.network or "", "network")
    assert isinstance(law, NetworkLaw)
    return law.cluster if isinstance(law, MeasuredNetwork) else law


def _links(request: Request) -> tuple[LinkCost, LinkCost, LinkCost]:
    """(the link within a node, between nodes, and between nodes that all send at once)."""
    law = _network_law(request)
    if isinstance(law, Cluster):
        law = dataclasses.replace(law, ranks_per_node=2)
        return link_cost(law, 0, 1), link_cost(law, 0, 2), link_cost(law, 0, 2, num_nodes=2)
    return (link_cost(law),) * 3


def _conditions(
    request: Request, job: Job, weights: Weights, probed: Probed | None
) -> tuple[Conditions, list[str]]:
    """What throughput depends on, and what of it nobody has said or measured."""
    assumed = [
        "times are closed forms; servers have nodes of their own; no gradients were computed for a loss curve"
    ]
    law: ComputeLaw | tuple[float, ...]
    if request.compute is not None:
        given = parse(request.compute, "compute")
        assert isinstance(given, ComputeLaw)
        law = given
    else:
        assert probed is not None
        law = probed.steps_s
        assumed.append("every device is like this host's, and workers vary as its steps did")
    values = {"apply_s": request.apply_s, "read_s": request.read_s}
    values |= {"fixed": request.fixed, "backward": request.backward}
    if probed is not None:
        measured = _as_probed(probed, job.batch_size)
        values = {key: measured[key] if value is None else value for key, value in values.items()}
        assumed.append("batches are read between steps, not ahead")
    says = {
        "apply_s": "a server's update takes no time (--apply-s)",
        "read_s": "batches are read while others are computed (--read-s)",
        "fixed": "computing is proportional to the samples (--fixed)",
        "backward": "an allreduce is not hidden behind the backward pass (--backward)",
    }
    assumed += [says[key] for key, value in values.items() if value is None]
    if request.push_s is None:
        assumed.append("a push takes a server no time beside its bytes and its update (--push-s)")
    if request.ranks_per_node is None:
        assumed.append("every worker has a node of its own (--ranks-per-node)")
    inside, between, together = _links(request)
    number = {key: value or 0.0 for key, value in values.items()}
    return (
        Conditions(
            network=_network_law(request),
            times=Times(law, job.seed),
            batch=job.batch_size,
            num_bytes=weights.gradients,
            inside=inside,
            between=between,
            together=together,
            workers_per_node=request.ranks_per_node or 1,
            apply_s=number["apply_s"],
            push_s=request.push_s or 0.0,
            read_s=number["read_s"],
            validate_s=probed.validate_s if probed is not None else 0.0,
            fixed=number["fixed"],
            backward=number["backward"],
        ),
        assumed,
    )


def _drawn(times: Times, most: int, settings: list[Setting]) -> list[str]:
    """How far off the times may be that are drawn."""
    lines = []
    for period in sorted({1, *(one.period for one in settings if one.kind == "localsgd")}):
        if interval := times.interval_s(most, period):
            low, high = (f"{one:.4g}" for one in interval)
            batches = f", for {period} batches," if period > 1 else ""
            lines.append(
                f"the last of {most} workers{batches} is drawn, and takes {low} to {high} s (95 % confidence)"
            )
    return lines


def _as_probed(probed: Probed, batch_size: int) -> dict[str, float]:
    """What a probe says of the numbers that a request may leave out."""
    whole_s = probed.forward_s + probed.backward_s + probed.optimizer_s
    one_s = probed.one_sample_s + probed.optimizer_s
    share = (one_s / whole_s - 1 / batch_size) / (1 - 1 / batch_size) if batch_size > 1 else 0.0
    return {
        "apply_s": probed.apply_s,
        "read_s": probed.read_s,
        "fixed": min(1.0, max(0.0, share)),
        "backward": probed.backward_s / whole_s,
    }


def _settings(request: Request, module: Any, weights: Weights, runs: VirtualRuns) -> list[Setting]:
    if request.strategies:
        return [setting_of(text, module, weights, runs) for text in request.strategies]
    return with_rows(_USUAL, runs)


_USUAL = [
    Setting("allreduce()", "allreduce"),
    Setting("localsgd(period=16)", "localsgd", period=16),
    Setting("sync(servers=1)", "servers", 1),
    Setting("backup(servers=1, spare=1)", "servers", 1, 1),
    Setting("async(servers=1)", "async", 1),
]


# Strategies whose speed follows from one batch and its messages, and as what kind; of others a virtual run tells it.
_IN_CLOSED_FORM: dict[type[Strategy], Callable[[Any], str]] = {
    Strategy: lambda one: "",
    AllReduce: lambda one: "" if one.codes_allreduce else "allreduce",
    LocalSGD: lambda one: "localsgd" if one == LocalSGD(one.period) else "",
    Sync: lambda one: "servers" if _pushes_every_batch(one) else "",
    Backup: lambda one: "servers" if _pushes_every_batch(one) else "",
    Async: lambda one: "async" if _pushes_every_batch(one) else "",
}


def setting_of(text: str, module: Any, weights: Weights, runs: VirtualRuns) -> Setting:
    """A strategy's text as what its speed depends on."""
    strategy = read_strategy(text)
    if strategy.aggregates:
        raise UsageError(
            f"{text}: a plan gives servers nodes of their own and knows of no aggregators: leave aggregate out, or ask "
            "mpitrain simulate --timing-only"
        )
    if runs.touches_rows:
        return setting_with_rows(text, strategy, runs)
    kind = strategy.choose(_IN_CLOSED_FORM)(strategy)
    if kind in ("allreduce", "localsgd"):
        return Setting(text, kind, period=strategy.period_steps)
    if kind:
        assert isinstance(strategy, ServerStrategy)
        push, reply = message_sizes(strategy, module, weights.numbers, torch.float32)
        shares = push / weights.gradients, reply / weights.gradients
        return Setting(text, kind, strategy.num_servers(), strategy.spare, 1, *shares)
    return virtual_setting(text, runs)


def _pushes_every_batch(strategy: ServerStrategy) -> bool:
    """In full or rounded numbers, and waits for the reply."""
    return (
        strategy.push_codec.is_none
        and strategy.reply_codec.is_none
        and strategy.batching == PerWorker()
        and strategy.push_every == strategy.pulls == strategy.inflight == 1
    )


def _start_s(request: Request, probed: Probed | None, assumed: list[str]) -> float:
    """Of a rank, as given or probed."""
    if request.start_s is not None:
        return request.start_s
    if probed is None:
        assumed.append("ranks start at once (--start-s)")
        return 0.0
    return probed.start_s


def _options(of: _Planned, counts: list[int], settings: list[Setting] | None) -> list[Option]:
    job, samples = of.job, of.catalogue.num_samples
    adaptive = any(word in type(of.optimizer).__name__ for word in _ADAPTIVE)

    def on(setting: Setting | None, number: int) -> Option:
        return option(setting, of.conditions, number, adaptive, samples, job.epochs, of.within_s)

    found = [on(None, 1)]
    for number in counts:
        some = settings
        if some is None:
            closed = candidates(number, samples, job.batch_size)
            some = with_rows(
                [*closed, *[virtual_setting(text, of.runs) for text in virtual_candidates(number)]], of.runs
            )
        for one in some:
            if one.needs() <= number and number > 1:
                with contextlib.suppress(UsageError):  # so many workers are refused
                    found.append(on(one, number))
    return found


def _advice(of: _Planned, options: list[Option]) -> list[dict[str, str]]:
    memory = None if of.request.memory_gib is None else of.request.memory_gib * GIB
    samples, sample = of.catalogue.num_samples, of.weights.sample
    found = advise(
        of.conditions,
        of.weights.rank_bytes(),
        None if sample is None else sample * samples,
        memory,
        samples,
        of.job.epochs,
        options,
        of.request.ranks_per_node or 1,
        of.start_s,
        of.calm,
        of.loaded,
    )
    return [{"question": question, "answer": answer} for question, answer in found]


def _row(one: Option) -> dict[str, Any]:
    return {
        "strategy": one.text,
        "workers": one.workers,
        "ranks": one.ranks,
        "samples_per_s": one.rate,
        "staleness": one.stale,
        "samples_per_update": one.step_samples,
        "learning_rate": one.learning_rate,
        "epochs": one.epochs,
        "alike": list(one.alike),
    }
