#!/usr/bin/env python3
"""Is what `mpitrain simulate` predicts what happens? Predicted first and written down, run afterwards.

    sudo .venv/bin/python benchmarks/prediction/prediction.py predict --record
    git commit -m "Predict ..." benchmarks/results/prediction.jsonl
    sudo .venv/bin/python benchmarks/prediction/prediction.py run --record
    .venv/bin/python benchmarks/prediction/prediction.py compare
    sudo .venv/bin/python benchmarks/prediction/prediction.py replay --record

Twelve update rules on four hosts of one rank each, whose links carry 50, 200 or 1000 Mbit/s (`hosts.py`), once with
even workers and once with one that takes five times as long a batch. A rule with servers has fewer workers, because
each server takes a host. What `predict` knows: the links as `mpitrain doctor --comm` measures them on these hosts
before, alone and while all send at once, with the eager limit, and the time of the job's batches, as the compute law
`measured` takes it. Nothing is fitted to a run. The time of a sample leaves out validations where the runs over MPI
leave them out. A round of all conditions takes 3 minutes to predict and 22 to run on 2 cores that nobody else uses.

A batch sleeps 60 ms besides its own computing (emulated compute), for two cores cannot compute for four workers at
once; the slow worker sleeps four times that longer. Figures: seconds a sample of all workers together, and the seconds
after which a validation reached the target first. Network namespaces need root.

`replay` asks something else: runs with uneven batches are traced, and simulated afterwards, with gradients and
validations, on the times that their workers took and on the links as measured. Their durations are compared.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from measuring.common import make_parser, table, write_row
from measuring.measurement import ROOT, VIRTUAL, Measurement
from pages.rows import rows_of

MEASUREMENT = Measurement(
    contestants=("the same runs over MPI",),
    wanted="a mean error of a step of at most 10 %, and the best rule predicted",
    depends=(*VIRTUAL, "mpitrain/cli", "mpitrain/doctor", "mpitrain/launch", "jobs/digits.py"),
    keys=("kind", "rate", "spread", "sharing", "date"),  # each round stands
    campaign=(
        "sudo .venv/bin/python benchmarks/prediction/prediction.py predict",
        "sudo .venv/bin/python benchmarks/prediction/prediction.py run",
        "python benchmarks/prediction/prediction.py compare",
        "sudo .venv/bin/python benchmarks/prediction/prediction.py replay",
    ),
)

HERE = Path(__file__).resolve().parent
HOSTS, BASE_S, SLOW_WORKER, FACTOR = 4, 0.06, 1, 5
RATES = ("50mbit", "200mbit", "1000mbit")
SPREADS = ("even", "one slow")
SHARINGS = ("fcfs", "fair")  # how messages that meet on a link are predicted to share it
STRATEGIES = (
    "allreduce()",
    "sync()",
    "backup(spare=1)",
    "async()",
    "async(servers=2)",
    'async(push_wire="float16")',
    "softsync(updates=2)",
    "ssp(bound=2)",
    "localsgd(period=4)",
    "localsgd(period=16)",
    "decentralized()",
    'decentralized(topology="ring")',
)
TARGET = 0.9  # accuracy
# What must hold: mean error of the step time, error of the time to the target, and how much slower than the best of a
# condition the rule may be that was predicted to be the best; in how many of the conditions.
STEP_ERROR, TARGET_ERROR, CHOICE, CONDITIONS = 0.10, 0.15, 0.05, 5


def injections(spread: str) -> tuple[str, ...]:
    """What makes a worker slow."""
    extra_s = (FACTOR - 1) * BASE_S
    return (f"stall(worker={SLOW_WORKER}, chance=1.0, seconds={extra_s:g})",) if spread == "one slow" else ()


def num_workers(strategy: str, hosts: int = HOSTS) -> int:
    """Of the ranks that servers leave."""
    from mpitrain.strategies.base import ServerStrategy
    from mpitrain.values import parse

    found = parse(strategy, "strategy")
    return hosts - found.num_servers() if isinstance(found, ServerStrategy) else hosts


def on_hosts(rate: str, *program: str, hosts: int = HOSTS) -> None:
    """Run a program on the hosts, a rank on each."""
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "measuring" / "hosts.py"),
        "run",
        "--hosts",
        str(hosts),
        "--rate",
        rate,
        "--burst",
        "16kb",
    ]
    subprocess.run([*command, *program], check=True)


def data(folder: Path) -> None:
    """Pack the digits where the job looks for them."""
    from mpitrain.data.sources import load_source
    from mpitrain.data.write.pack import PackOptions, pack

    pack(load_source("digits"), folder / "digits", PackOptions(0.2), source="digits")
    os.environ["PREDICTION_DATA"], os.environ["PREDICTION_BASE_S"] = str(folder / "digits"), str(BASE_S)


def predict(options: argparse.Namespace, folder: Path) -> None:
    """One row for each condition."""
    from mpitrain.job import Overrides, apply_overrides
    from mpitrain.simulation.comparison import Comparison
    from mpitrain.training.job_file import load_job
    from mpitrain.values import parse

    for rate in options.rates:
        links = measured_links(options, folder, rate)
        for spread in options.spreads:
            one = Overrides(
                run_dir=str(folder / f"{rate}-{spread}"), quiet=True, inject=injections(spread),
                target=(f"accuracy={TARGET}",), epochs=options.epochs,
            )  # fmt: skip
            job = apply_overrides(load_job(str(HERE / "prediction_job.py")), one)
            os.environ["PREDICTION_BASE_S"] = str(BASE_S)
            runs = Comparison(job, one, parse("measured(4)", "compute"))
            os.environ["PREDICTION_BASE_S"] = "0"  # measured: from here on it is virtual
            for sharing in SHARINGS:
                text = f'measured({json.dumps(str(links))}, sharing="{sharing}")'
                runs.network = network = parse(text, "network")
                found = {}
                for strategy in options.strategies:
                    with contextlib.redirect_stdout(io.StringIO()):
                        rule = parse(strategy, "strategy")
                        (row,) = runs.run([rule], [num_workers(strategy)])["rows"]
                    found[strategy] = {
                        "sample_s": (row["virtual_s"] - row["paused_s"]) / row["samples"],
                        "to_target_s": (row["to_target"] or {}).get("virtual_s"),
                    }
                show(f"predicted, {rate}, {spread}, links {sharing}", found)
                cluster = network.cluster
                write_row("prediction", {
                    "kind": "predicted", "rate": rate, "spread": spread, "sharing": sharing,
                    "epochs": options.epochs or job.epochs,
                    "link": {
                        "gbit_per_s": cluster.gbit_per_s, "latency_s": cluster.latency_s,
                        "busy_gbit_per_s": cluster.busy_gbit_per_s, "eager_bytes": cluster.eager_bytes,
                    },
                    "measured": runs.measured, "injections": injections(spread),
                    "batch_s": runs.measured["gradient_s"], "rules": found,
                })  # fmt: skip


def run(options: argparse.Namespace, folder: Path) -> None:
    """The same conditions on the hosts, all rules of one in one launch; of several rounds, the medians."""
    for rate in options.rates:
        for spread in options.spreads:
            out = folder / f"{rate}-{spread}.json"
            words = [
                "--rates",
                rate,
                "--spreads",
                spread,
                "--out",
                str(out),
                "--strategies",
                *options.strategies,
            ]
            words += ["--epochs", str(options.epochs)] if options.epochs else []
            rounds = []
            for _ in range(options.rounds):
                on_hosts(rate, sys.executable, str(HERE / "prediction.py"), "ranks", *words)
                rounds.append(json.loads(out.read_text()))
            rules = {name: medians([one["rules"][name] for one in rounds]) for name in options.strategies}
            show(f"measured, {rate}, {spread}", rules)
            row = {"kind": "measured", "rate": rate, "spread": spread, "rounds": options.rounds}
            write_row("prediction", rounds[-1] | row | {"rules": rules})


def medians(runs: list[dict]) -> dict:
    """Of the figures of one rule; a target that is missed in half of the runs is missed."""
    targets = [math.inf if one["to_target_s"] is None else one["to_target_s"] for one in runs]
    target_s = statistics.median_high(targets)
    return {
        "sample_s": statistics.median(one["sample_s"] for one in runs),
        "to_target_s": None if target_s == math.inf else target_s,
        "runs": runs,
    }


def replay(options: argparse.Namespace, folder: Path) -> None:
    """Runs traced on the hosts, and simulated on the times of their traces."""
    from mpitrain.job import Overrides, apply_overrides
    from mpitrain.simulation.comparison import Comparison
    from mpitrain.training.job_file import load_job
    from mpitrain.values import parse

    os.environ["PREDICTION_SPREAD"] = "0.7"
    for rate in options.rates:
        links, out = measured_links(options, folder, rate), folder / f"replay-{rate}.json"
        words = ["--rates", rate, "--spreads", "even", "--out", str(out), "--strategies", *options.strategies]
        on_hosts(
            rate, sys.executable, str(HERE / "prediction.py"), "ranks", "--traces", str(folder / rate), *words
        )
        real = json.loads(out.read_text())
        os.environ["PREDICTION_BASE_S"] = "0"
        found = {}
        for number, strategy in enumerate(options.strategies, 1):
            traced = f"trace({json.dumps(str(folder / rate / f'run-{number}'))})"
            one = Overrides(run_dir=str(folder / f"again-{rate}-{number}"), quiet=True)
            job = apply_overrides(load_job(str(HERE / "prediction_job.py")), one)
            network = parse(f'measured({json.dumps(str(links))}, sharing="fair")', "network")
            # measured here for what updates and coding take
            runs = Comparison(job, one, parse("measured(2)", "compute"), network)
            runs.compute = parse(traced, "compute")
            with contextlib.redirect_stdout(io.StringIO()):
                (row,) = runs.run([parse(strategy, "strategy")], [num_workers(strategy)])["rows"]
            real_s = real["rules"][strategy]["sample_s"]
            replayed_s = (row["virtual_s"] - row["paused_s"]) / row["samples"]
            found[strategy] = {
                "real_sample_s": real_s, "replayed_sample_s": replayed_s, "error": replayed_s / real_s - 1,
            }  # fmt: skip
        os.environ["PREDICTION_BASE_S"] = str(BASE_S)
        lines = [("rule", "ms a sample", "replayed", "error, %")]
        for name, one in found.items():
            figures = (1e3 * one["real_sample_s"], 1e3 * one["replayed_sample_s"], 100 * one["error"])
            lines.append((name, *(f"{value:.3f}" for value in figures[:2]), f"{figures[2]:+.1f}"))
        print(f"\n{rate}\n{table(lines)}", flush=True)
        write_row("prediction", {"kind": "replayed", "rate": rate, "rules": found})


def measured_links(options: argparse.Namespace, folder: Path, rate: str) -> Path:
    """What the doctor says of the hosts' links at this rate."""
    links = (options.links or folder) / f"comm-{rate}.json"
    if not links.exists():
        mpitrain = str(Path(sys.executable).parent / "mpitrain")
        on_hosts(rate, mpitrain, "doctor", "--comm", "--json", str(links))
    return links


def ranks(options: argparse.Namespace) -> None:
    """On each of the hosts: train by one rule after the other."""
    import torch

    import mpitrain as mt
    from mpitrain.mpi.runtime import start
    from mpitrain.training.job_file import load_job
    from mpitrain.values import parse

    runtime = start()
    torch.set_num_threads(1)
    made = options.traces or (tempfile.mkdtemp(prefix="prediction-") if runtime.rank == 0 else None)
    folder = Path(runtime.broadcast(str(made) if made else None))
    job = load_job(str(HERE / "prediction_job.py"))
    changes = {"epochs": options.epochs} if options.epochs else {}
    changes |= {"trace": "steps=0:100000"} if options.traces else {}
    goal, found = (f"accuracy={TARGET}",), {}
    (spread,) = options.spreads
    for number, strategy in enumerate([options.strategies[0], *options.strategies]):  # the first run warms up
        run_dir = folder / f"run-{number}"
        with contextlib.redirect_stdout(io.StringIO()):
            result = mt.train(
                job, parse(strategy, "strategy"), run_dir=str(run_dir), quiet=True, inject=injections(spread),
                target=goal, **(changes if number else {"epochs": 1}),
            )  # fmt: skip
        if runtime.rank == 0 and number:
            rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
            began_s = next(row["t"] for row in rows if row["event"] == "start")
            met = [row["t"] - began_s for row in rows if row.get("accuracy", 0.0) >= TARGET]
            found[strategy] = {
                "sample_s": 1 / result["samples_per_second"],
                "to_target_s": met[0] if met else None,
                "accuracy": result["accuracy"],
            }
        runtime.barrier()
    if runtime.rank == 0:
        row = {"epochs": options.epochs or job.epochs, "mpi": runtime.library, "rules": found}
        Path(options.out).write_text(json.dumps(row))
    runtime.finish()


def show(title: str, rules: dict) -> None:
    lines = [("rule", "ms a sample", "s to the target")]
    for name, row in rules.items():
        lines.append((name, f"{1e3 * row['sample_s']:.3f}", _seconds(row["to_target_s"])))
    print(f"\n{title}\n{table(lines)}", flush=True)


def _seconds(value: float | None) -> str:
    return "missed" if value is None else f"{value:.2f}"


def newest(rows: list[dict], sharing: str = SHARINGS[0]) -> list[tuple[dict, dict]]:
    """(predicted, measured) of each condition of which there are both: the newest run, and the prediction before."""
    pairs = {}
    predicted = {}
    for row in rows:
        key = row["rate"], row.get("spread")
        if row["kind"] == "predicted" and row.get("sharing", SHARINGS[0]) == sharing:
            predicted[key] = row
        elif row["kind"] == "measured" and key in predicted:
            pairs[key] = predicted[key], row
    return list(pairs.values())


def rounds(rows: list[dict], sharing: str = SHARINGS[0]) -> list[list[tuple[dict, dict]]]:
    """(predicted, measured) of every round of runs in their order, each row with the prediction before it. A round ends
    where a condition comes again."""
    predicted: dict[tuple[str, str], dict] = {}
    found: list[dict[tuple[str, str], tuple[dict, dict]]] = [{}]
    for row in rows:
        key = row["rate"], row.get("spread")
        if row["kind"] == "predicted" and row.get("sharing", SHARINGS[0]) == sharing:
            predicted[key] = row
        elif row["kind"] == "measured" and key in predicted:
            if key in found[-1]:
                found.append({})
            found[-1][key] = predicted[key], row
    return [list(one.values()) for one in found if one]


def judged(pairs: list[tuple[dict, dict]]) -> list[dict]:
    """Of each condition: errors of every rule, and the choice."""
    found = []
    for predicted, measured in pairs:
        rules = {}
        for name, real in measured["rules"].items():
            said = predicted["rules"][name]
            target_error = None
            if said["to_target_s"] is not None and real["to_target_s"] is not None:
                target_error = said["to_target_s"] / real["to_target_s"] - 1
            rules[name] = {"step": said["sample_s"] / real["sample_s"] - 1, "target": target_error}
        chosen, best = (_best(one["rules"]) for one in (predicted, measured))
        loss = math.inf
        if chosen is not None and best is not None:
            real_s = measured["rules"][chosen]["to_target_s"]
            loss = math.inf if real_s is None else real_s / measured["rules"][best]["to_target_s"] - 1
        found.append({
            "rate": measured["rate"], "spread": measured["spread"], "rules": rules, "chosen": chosen, "best": best,
            "loss": loss,
        })  # fmt: skip
    return found


def _best(rules: dict) -> str | None:
    met = {name: row["to_target_s"] for name, row in rules.items() if row["to_target_s"] is not None}
    return min(met, key=lambda name: met[name]) if met else None


def compare(rows: list[dict], sharing: str = SHARINGS[0]) -> str:
    """The table of errors, and what holds."""
    conditions = judged(newest(rows, sharing))
    if not conditions:
        return f"nothing was predicted for {sharing} links and run afterwards"
    names = list(dict.fromkeys(name for one in conditions for name in one["rules"]))
    lines = [("error of the step time, %", *(f"{one['rate']} {one['spread']}" for one in conditions))]
    for name in names:
        cells = (one["rules"].get(name) for one in conditions)
        lines.append((name, *("-" if cell is None else f"{100 * cell['step']:+.1f}" for cell in cells)))
    steps = [abs(rule["step"]) for one in conditions for rule in one["rules"].values()]
    targets = [
        abs(rule["target"])
        for one in conditions
        for rule in one["rules"].values()
        if rule["target"] is not None
    ]
    right = sum(one["loss"] <= CHOICE for one in conditions)
    text = [table(lines), ""]
    text.append(
        f"mean error of the step time: {100 * statistics.mean(steps):.1f} % of {len(steps)} runs (at most 10)"
    )
    if targets:
        within = sum(one <= TARGET_ERROR for one in targets)
        text.append(
            f"time to the target: mean error {100 * statistics.mean(targets):.1f} %, {within} of {len(targets)} within "
            f"{100 * TARGET_ERROR:g} %"
        )
    for one in conditions:
        loss = "target missed" if one["loss"] == math.inf else f"{100 * one['loss']:.1f} % slower"
        text.append(
            f"{one['rate']} {one['spread']}: predicted best {one['chosen']}, best {one['best']}: {loss}"
        )
    text.append(
        f"the predicted best is at most {100 * CHOICE:g} % slower than the best: {right} of {len(conditions)}"
    )
    return "\n".join(text)


def main() -> int:
    """The command line."""
    parser = make_parser(__doc__, MEASUREMENT)
    parser.add_argument("what", choices=["predict", "run", "compare", "replay", "ranks"])
    parser.add_argument("--rates", nargs="+", choices=RATES, default=RATES)
    parser.add_argument("--spreads", nargs="+", choices=SPREADS, default=SPREADS)
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--rounds", type=int, default=1, help="how often `run` runs each condition")
    parser.add_argument(
        "--links", type=Path, help="keep what the doctor has measured here, and use what is there"
    )
    parser.add_argument("--traces", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.what == "compare":
        rows = list(rows_of("prediction"))
        for sharing in SHARINGS:
            print(f"\nlinks predicted {sharing}\n{compare(rows, sharing)}")
        return 0
    if options.what == "ranks":
        ranks(options)
        return 0
    if os.geteuid() != 0:
        parser.error("network namespaces need root")
    with tempfile.TemporaryDirectory(prefix="prediction-") as scratch:
        data(Path(scratch))
        {"predict": predict, "run": run, "replay": replay}[options.what](options, Path(scratch))
    return 0


if __name__ == "__main__":
    sys.exit(main())
