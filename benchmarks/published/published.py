"""Does the simulation come to the speed-ups and shapes that others have published?

    python benchmarks/published/published.py [--rounds 3] [--only NAME ...] [--quick]

What each curve is simulated from was written down in `published_assumptions.py` before any was computed, from the
hardware of the time, and is fitted to no published speed-up; what counts as a hit stands there, too. A miss is told as
a miss. Virtual time, one process, no MPI: the server's and the workers' own roles, without gradients where only time
counts (`time_run`), and with a convnet on handwritten digits where losses do.

A speed-up is the rate of samples over that of one worker that trains alone, without a network: the share of its time
that each worker computes, added up. It is taken between two runs with the same times, one of twice as many steps, so
that beginning and end drop out. What a server computes, and transfers
that hide behind computing, are left out. Every assumption is doubled and halved, one at a time; the table names the one
that moves the result most, and the range from the one end to the other. Virtual results do not depend on the machine's
load.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from measuring.common import make_parser, table, write_row
from measuring.measurement import VIRTUAL, Command, Measurement
from published_assumptions import CURVES, DENSE_MODELS, PERIODS, STALENESS_WORKERS, Curve

from mpitrain.simulation.timing import Workload, time_run
from mpitrain.strategies import Async, Backup, Sync
from mpitrain.strategies.base import ServerStrategy
from mpitrain.virtual import Bernoulli, Cluster, ComputeLaw, Ideal, Link, LogNormal, NetworkLaw
from mpitrain.virtual.network import Links

MEASUREMENT = Measurement(
    contestants=("published curves",),
    wanted="what `published_assumptions.py` calls a hit",
    depends=(*VIRTUAL, "jobs/digits.py"),
    keys=("curve",),
    figures=("simulated",),
    commands=(Command("python benchmarks/published/published.py --rounds 1", minutes=20),),
)

ENDLESS = 10**12  # samples of a data set that no run gets through
TOUCHED_ONLY = "table_million"  # tells what all rows would cost, and nothing about those that travel
RULES: dict[str, type[ServerStrategy]] = {"async": Async, "sync": Sync}


@dataclasses.dataclass(frozen=True)
class Effort:
    """How long runs are, which no result should hang on.

    Args:
        steps: of a worker, `many_steps` where hundreds of workers push, and `long_steps` until queues have settled.
        servers: that are simulated one by one, `many_servers` where hundreds of workers push; more of them stand in
            equal groups, each with one link that is as fast as theirs together.
        backup_pushes: of all workers; epochs: of the convnet.
        staleness_steps, averaging_epochs: in place of the assumed ones, 0 for those.
        compares: whether figures are simulated, too, that only the text needs.
    """

    steps: int = 10
    many_steps: int = 8
    long_steps: int = 20
    servers: int = 17
    many_servers: int = 5
    backup_pushes: int = 8000
    epochs: int = 8
    staleness_steps: int = 0
    averaging_epochs: int = 0
    compares: bool = True


QUICK = Effort(2, 1, 2, 5, 2, 600, 1, 20, 1, False)


@dataclasses.dataclass(frozen=True)
class Found:
    """What a simulation came to: the `value` that a hit is judged by, what the table shows of it, whether all else that
    a hit demands holds, and further figures for the row.
    """

    value: float
    text: str
    holds: bool = True
    more: dict[str, Any] = dataclasses.field(default_factory=dict)


Values = Mapping[str, float]
Simulator = Callable[[Curve, Values, Sequence[int], Effort], Found]


def law(values: Values, step_s: float) -> Bernoulli:
    """Seconds of a worker's step: log-normal about `step_s`, and now and then a slow one."""
    usual = LogNormal(step_s, values["spread_sigma"])
    return Bernoulli(usual, values["slow_chance"], values["slow_factor"])


def place(values: Values, num_workers: int, most: int) -> tuple[int, NetworkLaw]:
    """How many servers are simulated, at most so many, and the network between them and the workers."""
    wanted = max(1, round(values["servers_per_worker"] * num_workers))
    group = math.ceil(wanted / most)
    rate, latency_s = values["link_gbit_per_s"], values["latency_s"]
    if group == 1:
        return wanted, Link(rate, latency_s)
    return round(wanted / group), Cluster(
        gbit_per_s=rate * group, latency_s=latency_s, device_gbit_per_s=rate
    )  # a worker's own link is that of its device


def speedup(
    rule: str,
    num_workers: int,
    numbers: float,
    step_s: float,
    values: Values,
    seed: int,
    steps: int,
    servers: int,
) -> float:
    """Rate of all workers over that of one alone, where each step exchanges `numbers` of 4 bytes."""
    num_servers, network = place(values, num_workers, servers)
    strategy = RULES[rule](servers=num_servers)
    ends = []
    for num_steps in (steps, 2 * steps):
        load = Workload(max(num_servers, round(numbers)), ENDLESS, 1, steps=num_steps)
        found = time_run(strategy, load, num_workers, law(values, step_s), network, seed)
        ends.append([(row["compute_s"], row["wait_s"]) for row in found["per_worker"]])
    shares = []
    for (first_s, first_wait_s), (last_s, last_wait_s) in zip(*ends):
        computing_s = last_s - first_s
        shares.append(computing_s / (computing_s + last_wait_s - first_wait_s))
    return sum(shares)


def step_of(values: Values) -> float:
    """Seconds of a step, from its work and the worker's rate."""
    return values["batch_samples"] * values["sample_gflop"] / values["worker_gflop_per_s"]


def middle(one: Callable[[int], float], seeds: Sequence[int], **more: Any) -> Found:
    """A speed-up: the median over the seeds."""
    found = [one(seed) for seed in seeds]
    value = statistics.median(found)
    return Found(value, f"{value:.3g}x", more={"by_seed": found, **more})


def dense(curve: Curve, values: Values, seeds: Sequence[int], effort: Effort, rule: str = "") -> Found:
    """A model whose every number travels."""
    numbers, step_s = values["parameters_million"] * 1e6, step_of(values)

    def one(seed: int) -> float:
        used = rule or curve.strategy
        return speedup(used, curve.num_workers, numbers, step_s, values, seed, effort.steps, effort.servers)

    return middle(one, seeds, step_s=step_s)


def typical(curve: Curve, values: Values, seeds: Sequence[int], effort: Effort, rule: str = "") -> Found:
    """The median of some dense models."""
    each = {}
    for name, sizes in DENSE_MODELS.items():
        own = {one.name: one.value for one in sizes}
        own["parameters_million"] *= values["parameters_scale"]
        own["batch_samples"] *= values["batch_scale"]
        each[name] = dense(curve, {**values, **own}, seeds, effort, rule).value
    value = statistics.median(each.values())
    return Found(value, f"{value:.3g}x", more={"models": each})


def sparse(curve: Curve, values: Values, seeds: Sequence[int], effort: Effort) -> Found:
    """A model of which only the rows that a batch touches travel, with their ids, and all of its dense layers."""
    layers = values["dense_million"] * 1e6
    rows = values["batch_samples"] * values["rows_per_sample"] * values["distinct_share"]
    numbers = layers + rows * (values["row_numbers"] + values["id_numbers"])
    step_s = values["batch_samples"] * layers * 6e-9 / values["worker_gflop_per_s"]

    def one(seed: int, travelling: float = numbers) -> float:
        size = (effort.many_steps, effort.many_servers)
        return speedup("async", curve.num_workers, travelling, step_s, values, seed, *size)

    more: dict[str, float] = {"step_s": step_s, "push_bytes": 4 * numbers}
    if effort.compares:
        more["all_rows"] = one(seeds[0], layers + values[TOUCHED_ONLY] * 1e6)
    return middle(one, seeds, **more)


def convnet(curve: Curve, values: Values, seeds: Sequence[int], effort: Effort) -> Found:
    """Time to the lowest training loss."""
    from published_job import time_to_lowest

    num_servers, _ = place(values, curve.num_workers, effort.servers)
    times = law(values, step_of(values))
    found = [time_to_lowest(values, times, num_servers, seed, effort.epochs) for seed in seeds]
    more = {"runs": [run for _, run in found], "step_s": step_of(values)}
    value = statistics.median(ratio for ratio, _ in found)
    return Found(value, f"{value:.3g}x", more={"by_seed": [ratio for ratio, _ in found], **more})


def accepted_per_s(spare: int, num_workers: int, times: ComputeLaw, seed: int, steps: int) -> float:
    """Gradients a virtual second that so many spares leave; what the network takes is in the law."""
    rule = Backup(spare=spare) if spare else Sync()
    found = time_run(rule, Workload(1, ENDLESS, 1, steps=steps), num_workers, times, Ideal(), seed)
    return float(found["accepted"] / found["virtual_s"])


def backup(curve: Curve, values: Values, seeds: Sequence[int], effort: Effort) -> Found:
    """The number of spares with which most gradients are accepted a second."""
    number, times = curve.num_workers, law(values, 1.0)
    steps = max(4, effort.backup_pushes // number)
    spares = [spare for spare in (0, 1, 2, 3, 4, 5, 6, 8, 12, 16) if spare < number // 2]
    rates = {
        spare: statistics.mean(accepted_per_s(spare, number, times, seed, steps) for seed in seeds)
        for spare in spares
    }
    best = max(spares, key=lambda spare: rates[spare])
    told = {str(spare): rate / rates[0] for spare, rate in rates.items()}
    return Found(best, f"best {best}", more={"accepted_over_none": told})


def averaging(curve: Curve, values: Values, seeds: Sequence[int], effort: Effort) -> Found:
    """Losses by the averaging period."""
    from published_job import losses_by_period, over_shortest

    if effort.averaging_epochs:
        values = {**values, "epochs": effort.averaging_epochs}
    periods = PERIODS if effort.compares else PERIODS[:-1]
    value, holds, losses = over_shortest([losses_by_period(values, seed, periods) for seed in seeds])
    return Found(value, f"x{value:.3g}", holds, {"losses": losses})


class Watched:
    """A `link` that notes how long messages wait at the receiver's end for others to pass."""

    def __init__(self, rate: float, latency_s: float, servers: int):
        waits: list[tuple[float, float]] = []

        @dataclasses.dataclass(frozen=True, repr=False)
        class Noting(Link):
            def arrival_s(self, links: Links, now_s: float, source: int, to: int, num_bytes: int) -> float:
                arrival_s = super().arrival_s(links, now_s, source, to, num_bytes)
                if to < servers <= source and num_bytes > 1000:
                    waits.append((now_s, arrival_s - links.outgoing[source] - self.latency_s))
                return arrival_s

        self.law, self.waits = Noting(rate, latency_s), waits


def mean_wait_s(rule: str, curve: Curve, values: Values, seed: int, steps: int, num_servers: int) -> float:
    """Seconds that a push waits at a server's link, in the second half of a run."""
    network = Watched(values["link_gbit_per_s"], values["latency_s"], num_servers)
    load = Workload(round(values["parameters_million"] * 1e6), ENDLESS, 1, steps=steps)
    times = law(values, step_of(values))
    found = time_run(RULES[rule](servers=num_servers), load, curve.num_workers, times, network.law, seed)
    return statistics.mean(wait for at_s, wait in network.waits if at_s > found["virtual_s"] / 2)


def burst(curve: Curve, values: Values, seeds: Sequence[int], effort: Effort) -> Found:
    """How much longer pushes wait that come all at once."""
    num_servers = max(1, round(values["servers_per_worker"] * curve.num_workers))
    push_s = values["parameters_million"] * 1e6 * 32 / num_servers / (values["link_gbit_per_s"] * 1e9)
    waits_s = {
        rule: statistics.median(
            mean_wait_s(rule, curve, values, seed, effort.long_steps, num_servers) for seed in seeds
        )
        for rule in RULES
    }
    value = waits_s["sync"] / max(waits_s["async"], push_s / 1000)
    in_pushes = {rule: wait_s / push_s for rule, wait_s in waits_s.items()}
    return Found(value, f"{value:.3g}x wait", more={"waits_in_pushes": in_pushes})


def staleness(curve: Curve, values: Values, seeds: Sequence[int], effort: Effort) -> Found:
    """Mean staleness over N - 1."""
    steps, shares, means = effort.staleness_steps or round(values["steps"]), {}, {}
    for number in STALENESS_WORKERS:
        load = Workload(1, ENDLESS, 1, steps=steps)
        found = [time_run(Async(), load, number, law(values, 1.0), Ideal(), seed) for seed in seeds]
        means[str(number)] = statistics.median(one["staleness_mean"] for one in found)
        shares[number] = means[str(number)] / (number - 1)
    value = max(shares.values(), key=lambda share: abs(share - 1))
    return Found(value, f"{value:.3g}(N-1)", more={"means": means, "steps": steps})


SIMULATORS: dict[str, Simulator] = {
    "nmt": dense, "inception": dense, "rankbrain": sparse, "dense": typical, "convnet": convnet,
    "backup 18+2": backup, "backup 96+4": backup, "averaging": averaging, "burst": burst, "staleness": staleness,
}  # fmt: skip


def sensitivity(curve: Curve, one_seed: Callable[[Values], Found]) -> dict[str, tuple[float, float]]:
    """The result with half and with twice each assumption."""
    found = {}
    for one in curve.assumptions:
        if one.name != TOUCHED_ONLY:
            ends = (one.value / 2, one.value * 2)
            halved, doubled = (one_seed({**curve.values(), one.name: value}).value for value in ends)
            found[one.name] = (halved, doubled)
    return found


def most_sensitive(found: Mapping[str, tuple[float, float]], value: float) -> str:
    """The assumption that moves the result by the largest factor; empty where none moves it."""

    def moves(name: str) -> float:
        return max(abs(math.log(max(end, 1e-9) / max(value, 1e-9))) for end in found[name])

    most = max(found, key=moves, default="")
    return most if most and moves(most) > 1e-3 else ""


def simulate_curve(curve: Curve, num_seeds: int, effort: Effort, vary: bool) -> dict[str, Any]:
    """One row of the results."""
    began_s = time.process_time()
    simulate: Callable[..., Found] = functools.partial(SIMULATORS[curve.name], curve)
    found = simulate(curve.values(), range(num_seeds), effort)
    varied, most, other = {}, None, {}
    if vary:
        one_seed = functools.partial(simulate, seeds=(0,), effort=dataclasses.replace(effort, compares=False))
        varied = sensitivity(curve, one_seed)
        most = most_sensitive(varied, one_seed(curve.values()).value)
        if curve.other:
            other = {curve.other: one_seed(curve.values(), rule=curve.other).value}
    low, high = curve.published.low, curve.published.high
    return {
        "curve": curve.name, "published": curve.published.figure, "source": curve.published.source,
        "criterion": curve.published.criterion, "bounds": [low, high if math.isfinite(high) else None],
        "workers": curve.num_workers, "strategy": curve.strategy, "simulated": found.value, "shown": found.text,
        "hit": low <= found.value <= high and found.holds, "rounds": num_seeds, "more": found.more,
        "assumptions": [dataclasses.asdict(one) for one in curve.assumptions],
        "sensitivity": varied, "most_sensitive": most,
        "other_rule": other, "effort": dataclasses.asdict(effort), "cpu_s": time.process_time() - began_s,
    }  # fmt: skip


def told(row: Mapping[str, Any]) -> str:
    """What a result hangs on, as text: the assumption, and the results with half and twice of it."""
    name = row["most_sensitive"]
    if name is None:
        return "not varied"
    if not name:
        return "none"
    low, high = sorted(row["sensitivity"][name])
    return f"{name} {low:.3g}-{high:.3g}"


def lines(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table of all curves, at most 80 columns wide."""
    head = ("curve", "published", "simulated", "", "most sensitive to")
    body = [
        (row["curve"], row["published"], row["shown"], "hit" if row["hit"] else "miss", told(row))
        for row in rows
    ]
    notes = [
        f"{row['curve']}: {value:.3g}x with {rule}() in place of {row['strategy']}()"
        for row in rows
        for rule, value in row["other_rule"].items()
    ]
    notes += [
        f"{row['curve']}: {row['more']['all_rows']:.3g}x if all rows travelled"
        for row in rows
        if "all_rows" in row["more"]
    ]
    return "\n".join([table([head, *body]), *notes])


def main() -> None:
    parser = make_parser(__doc__, MEASUREMENT)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rounds", type=int, default=3, help="seeds of every curve (default: 3)")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=sorted(SIMULATORS), help="some curves")
    parser.add_argument("--quick", action="store_true", help="short runs of one seed; nothing is varied")
    options = parser.parse_args()
    effort, num_seeds = (QUICK, 1) if options.quick else (Effort(), options.rounds)
    rows = []
    for curve in CURVES:
        if options.only is None or curve.name in options.only:
            row = simulate_curve(curve, num_seeds, effort, not options.quick)
            rows.append(row)
            print(f"{curve.name}: {row['cpu_s']:.0f} s", flush=True)
            write_row("published", row)
    print(lines(rows), flush=True)


if __name__ == "__main__":
    main()
