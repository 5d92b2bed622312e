"""What does one slow worker of four cost each update rule, in samples per second and in time to the target?

    mpitrain launch -n 5 benchmarks/stragglers.py [--seeds 5] [--epochs 8] [--base-ms 12] [--compute emulated real]
        [--strategies "sync()" "async()" ...]

The digits job on four workers, one of which takes five times as long a batch: it sleeps, it does not spin, four
times what a batch takes on a core of its own (measured first, on one rank, while the others wait). The sleep is
the same for every contestant. `slow(factor=5)` would multiply what each batch took in that contestant, and where
four workers are let go at once on two cores that is twice as long as under DDP, whose slow rank computes after
its sleep, when the others are done: a longer sleep would be ordered for the one than for the other.
Rank 0 serves; when it is the turn of torch's DDP over gloo, the peer, it waits, and the slow rank sleeps by
the same helper, on the same batches. Two kinds of row:

    emulated compute   every worker also sleeps 12 ms in each batch, so that two cores can carry four workers
    real compute       nothing but the model's own forward and backward passes, on however few cores there are

All rules take their turn for each seed, in rotated order. The target is the job's (97 % of the validation
samples), looked at after every epoch by the lowest worker; the clock starts with the run and includes that.
Samples per second count accepted samples, from the end of the warm-up to the last one.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import math
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from measuring.common import machine, make_parser, median_ratio, table, write_row
from measuring.gloo import never_destroyed, start_gloo
from measuring.measurement import TRAINING, Command, Measurement

import mpitrain as mt
from mpitrain.data.sources import load_source
from mpitrain.data.write.pack import PackOptions, pack
from mpitrain.inject import Straggler, read
from mpitrain.mpi.runtime import start
from mpitrain.reporting.report import NullReport
from mpitrain.reporting.targets import read_target
from mpitrain.strategies.sampling.dealer import share_out
from mpitrain.training.job_file import load_job
from mpitrain.training.measure import Meter, build, num_warmup
from mpitrain.training.synchronous.ddp import data_parallel
from mpitrain.training.synchronous.injected_delay import InjectedDelay
from mpitrain.training.validations.validation import make_measure
from mpitrain.values import parse

MEASUREMENT = Measurement(
    contestants=("torch's DDP over gloo",),
    wanted="asynchronous rules: twice the samples per second of `sync()`, and sooner at the target",
    depends=(*TRAINING, "jobs/digits.py"),
    keys=("compute",),
    figures=("rules.*.ratio_to_sync",),
    commands=(Command("mpitrain launch -n 5 benchmarks/stragglers.py --rounds 3", minutes=5),),
)

WORKERS, SLOW_WORKER, FACTOR = 4, 2, 5
BASE, PEER = "sync()", "torch DDP over gloo"
STRATEGIES = [BASE, "backup(spare=1)", "async()", "softsync(updates=2)", "ssp(bound=3)"]
MUST_GAIN = STRATEGIES[1:4]  # at least twice the samples per second of sync, and sooner at the target
KINDS = ["emulated", "real"]

runtime = start()


def digits(folder: Path, base_s: float) -> mt.Job:
    """The main job on data of ours, each batch `base_s` longer."""
    job = load_job(str(Path(__file__).parents[1] / "jobs" / "digits.py"))
    plain = job.loss

    def slept(model, batch):
        if model.training:
            time.sleep(base_s)
        return plain(model, batch)

    shards = {name: mt.Shards(f"{folder}/digits/{name}-*.h5") for name in ("train", "validate")}
    return dataclasses.replace(
        job, data=shards["train"], validate=shards["validate"], loss=slept if base_s else plain
    )


def batch_s(job):
    """What a batch takes where nobody else computes, in seconds; measured on rank 0."""
    seconds = []
    if runtime.rank == 0:
        module, _ = build(job, None, torch.device("cpu"))
        with job.data.reader(job.data.scan(), job.seed) as reader:
            for step in range(40):
                batch = reader.batch(0, step * job.batch_size, job.batch_size)
                began_s = time.monotonic()
                job.loss(module, batch).backward()
                seconds.append(time.monotonic() - began_s)
    return runtime.broadcast(statistics.median(seconds[10:]) if seconds else None)


def order(job):
    """The injection that makes one worker `FACTOR` times as slow."""
    seconds = (FACTOR - 1) * batch_s(job)
    return f"stall(worker={SLOW_WORKER}, chance=1.0, seconds={seconds:.5f})"


def run_ours(job, strategy, inject, folder):
    """One run over our server; what rank 0 finds in its files."""
    with contextlib.redirect_stdout(io.StringIO()):  # the FOM line of every run would drown the table
        result = mt.train(job, strategy, run_dir=str(folder), quiet=True, inject=inject)
    if runtime.rank != 0:
        return None
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    begin_s = rows[0]["t"]
    marks = [(row["t"] - begin_s, row["accuracy"]) for row in rows if "accuracy" in row]
    counts = {"slept_s": result["injected"][0]["slept_s"]}
    counts |= {key: result[key] for key in ("steps", "accepted", "late", "staleness_mean")}
    return summary(result["samples_per_second"], marks, job) | counts


def run_gloo(job, inject, group):
    """The same training by torch's DDP over gloo; figures on the lowest worker, what it slept on each."""
    worker, began_s = runtime.rank - 1, time.monotonic()
    module, optimizer = build(job, None, torch.device("cpu"))
    delay = InjectedDelay(Straggler(read([inject]), worker, job.seed), module.parameters(), runtime.fail)
    parallel = data_parallel(module, group)
    catalogue = job.data.scan()
    batch = job.batch_size * WORKERS
    meter = Meter(NullReport(), num_warmup(job.epochs * math.ceil(catalogue.num_samples / batch)))
    measure = make_measure(job, module, job.validate.scan(), torch.device("cpu"))
    marks, samples, steps = [], 0, 0
    with job.data.reader(catalogue, job.seed) as reader:
        for epoch in range(job.epochs):
            for cursor in range(0, catalogue.num_samples, batch):
                count = min(batch, catalogue.num_samples - cursor)
                first, share = share_out(cursor, count, WORKERS, worker)
                data = reader.batch(epoch, first, share)
                module.train()
                optimizer.zero_grad(set_to_none=True)
                delay.begin()
                loss = job.loss(parallel, data)
                (loss * (share * WORKERS / count)).backward()
                optimizer.step()
                samples, steps = samples + count, steps + 1
                meter.progress(samples, steps, epoch + 1, float(loss.detach()))
                delay.sleep_after_step()
            if worker == 0:
                marks.append((time.monotonic() - began_s, measure()["accuracy"]))
    counts = {"steps": steps, "accepted": steps * WORKERS, "late": 0, "staleness_mean": 0.0}
    found = summary(meter.result()["samples_per_second"], marks, job) | counts if worker == 0 else {}
    return found | {"slept_s": delay.straggler.slept_s}


def summary(rate, marks, job):
    """`to_target_s` is None where the target was missed."""
    target = read_target("accuracy", job.target["accuracy"])
    reached = (seconds for seconds, accuracy in marks if target.met(accuracy))
    return {
        "samples_per_second": rate, "to_target_s": next(reached, None), "accuracy": marks[-1][1],
        "accuracies": [round(accuracy, 4) for _, accuracy in marks],
    }  # fmt: skip


def base_s(kind, options):
    """Seconds that every worker sleeps in each batch besides computing."""
    return options.base_ms / 1e3 if kind == "emulated" else 0.0


def contest(kind, seed, inject, options, folder, group):
    """One round: every contestant once; figures by name on rank 0."""
    job = dataclasses.replace(digits(folder, base_s(kind, options)), seed=seed, epochs=options.epochs)
    names = [*options.strategies, PEER]
    turn = seed % len(names)
    figures = {}
    for name in names[turn:] + names[:turn]:
        runtime.barrier()
        if name != PEER:
            figures[name] = run_ours(job, parse(name, "strategy"), inject, folder / f"{kind}-{seed}-{name}")
        else:
            each = runtime.allgather(run_gloo(job, inject, group) if runtime.rank > 0 else {"slept_s": 0.0})
            figures[name] = each[1] | {"slept_s": max(one["slept_s"] for one in each)}
        if runtime.rank == 0:
            found = figures[name]
            print(
                f"{kind} seed {seed} {name}: {found['samples_per_second']:.0f} samples/s, target "
                f"{_seconds(found['to_target_s'])}, accuracy {found['accuracy']:.4f}, late {found['late']}",
                flush=True,
            )
    return figures


def _seconds(value):
    return "missed" if value is None or value == math.inf else f"{value:.2f} s"


def show(kind, rounds, rules):
    """The table of one kind of compute, and its row for the results file."""
    label = "emulated compute" if kind == "emulated" else "real compute"
    lines = [
        ("rule", "samples/s", "ratio to sync", "95 % interval", "to target", "reached", "late", "staleness")
    ]
    row = {"compute": label, "rules": {}}
    base = [figures[BASE]["samples_per_second"] for figures in rounds]
    for name in [*rules, PEER]:
        runs = [figures[name] for figures in rounds]
        rates = [run["samples_per_second"] for run in runs]
        ratio = median_ratio(rates, base)
        target_s = statistics.median(
            math.inf if run["to_target_s"] is None else run["to_target_s"] for run in runs
        )
        reached = sum(run["to_target_s"] is not None for run in runs)
        late, staleness = (statistics.median(run[key] for run in runs) for key in ("late", "staleness_mean"))
        lines.append((
            name, f"{statistics.median(rates):.0f}", f"{ratio[0]:.2f}", f"{ratio[1]:.2f} - {ratio[2]:.2f}",
            _seconds(target_s), f"{reached}/{len(runs)}", f"{late:g}", f"{staleness:.2f}",
        ))  # fmt: skip
        row["rules"][name] = {
            "samples_per_second": statistics.median(rates), "ratio_to_sync": ratio,
            "to_target_s": None if target_s == math.inf else target_s, "reached": reached, "runs": runs,
        }  # fmt: skip
    print(f"\n{label}: worker {SLOW_WORKER} of {WORKERS} {FACTOR}x as slow, medians of {len(rounds)} seed(s)")
    print(table(lines))
    sync = row["rules"][BASE]["to_target_s"] or math.inf
    for name in (name for name in MUST_GAIN if name in rules):
        found = row["rules"][name]
        sooner = (found["to_target_s"] or math.inf) < sync
        row["rules"][name]["holds"] = holds = found["ratio_to_sync"][0] >= 2 and sooner
        if kind == "emulated":
            print(
                f"{name}: at least 2x sync's samples/s and sooner at the target: {'yes' if holds else 'NO'}"
            )
    return row


def main():
    parser = make_parser(__doc__, MEASUREMENT)
    parser.add_argument("--rounds", "--seeds", dest="seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--base-ms", type=float, default=12)
    parser.add_argument("--compute", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument(
        "--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES, help=f"always with {BASE}"
    )
    options = parser.parse_args()
    options.strategies = [name for name in STRATEGIES if name in options.strategies or name == BASE]
    assert runtime.size == WORKERS + 1, f"start with {WORKERS + 1} ranks"
    torch.set_num_threads(1)
    folder = Path(runtime.broadcast(tempfile.mkdtemp(prefix="stragglers-") if runtime.rank == 0 else None))
    if runtime.rank == 0:
        print(f"{machine()['cpu']}, {machine()['num_cores']} cores, one thread a rank", flush=True)
        pack(load_source("digits"), folder / "digits", PackOptions(0.2), source="digits")
    start_gloo(runtime)
    group = dist.new_group(list(range(1, runtime.size)), backend="gloo")
    # not counted: the first run of a process pays for torch's lazy imports, several seconds on few cores
    orders = dict.fromkeys(KINDS, order(digits(folder, 0.0)))
    contest(
        "real",
        options.seeds,
        orders["real"],
        argparse.Namespace(**vars(options) | {"epochs": 1}),
        folder,
        group,
    )
    if runtime.rank == 0:
        print("this was the warm-up; from here on it counts", flush=True)
    orders = {kind: order(digits(folder, base_s(kind, options))) for kind in options.compute}
    rounds = {kind: [] for kind in options.compute}
    for seed in range(options.seeds):
        for kind in options.compute:
            rounds[kind].append(contest(kind, seed, orders[kind], options, folder, group))
    if runtime.rank == 0:
        for kind in options.compute:
            row = show(kind, rounds[kind], options.strategies) | {
                "seeds": options.seeds,
                "epochs": options.epochs,
                "inject": orders[kind],
                "slept_per_batch_s": base_s(kind, options),
            }
            write_row("stragglers", row)
        shutil.rmtree(folder)
    never_destroyed(group)
    dist.destroy_process_group()
    runtime.finish()


if __name__ == "__main__":
    main()
