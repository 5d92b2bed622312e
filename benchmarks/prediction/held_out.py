#!/usr/bin/env python3
"""Are predictions right of what nobody has seen? Twelve rules under conditions drawn after the model was committed.

    git commit ...                                                                        # the model
    .venv/bin/python benchmarks/prediction/held_out.py publish; git commit ...            # the seed is that commit's
    sudo .venv/bin/python benchmarks/prediction/held_out.py predict --record; git commit ...
    sudo .venv/bin/python benchmarks/prediction/held_out.py run --record                  # goes on where it was stopped
    .venv/bin/python benchmarks/prediction/held_out.py compare

The conditions (`held_out_conditions.py`) and jobs (`held_out_job.py`) are new to the model; what it was made better by
is the training set, `prediction.py`. A cell is a rule under a condition, of three seeds. `simulate` and `plan` know the
links as `mpitrain doctor --comm` measures them on the hosts, shared fairly, and the time of a batch as measured alone;
nothing is fitted to a run. A plan has no time to a target: it is the simulation's samples at the plan's speed. Each
cell is run once, and stands: `run` runs those of which there is no row.

A batch is emulated by a sleep, so that two cores carry six workers. Network namespaces need root. `--seed N` draws
other conditions, for trying; they are no part of the held-out set, and are not recorded.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from held_out_conditions import Condition, draw, publish, published
from held_out_verdict import cells_of, told
from measuring.common import git, make_parser, table, write_row
from measuring.measurement import LAUNCHED, Measurement
from pages.rows import rows_of
from prediction import STRATEGIES, medians, num_workers, on_hosts

MEASUREMENT = Measurement(
    contestants=("`mpitrain simulate`", "`mpitrain plan`", "the same runs over MPI"),
    wanted="a mean error of the step time of at most 10 %, a median error of the time to the target of at most 15 %, "
    "the right rule in at least 7 of 8 conditions",
    depends=(
        *LAUNCHED, "mpitrain/simulation", "mpitrain/virtual", "mpitrain/planning", "mpitrain/doctor", "jobs",
        "benchmarks/prediction/prediction.py", "benchmarks/prediction/held_out_job.py",
        "benchmarks/prediction/held_out_conditions.py",
    ),
    keys=("date",),  # each cell is run once, and stands
    campaign=(
        "sudo .venv/bin/python benchmarks/prediction/held_out.py predict --record",
        "sudo .venv/bin/python benchmarks/prediction/held_out.py run --record",
        "python benchmarks/prediction/held_out.py compare",
    ),
)  # fmt: skip

HERE = Path(__file__).resolve().parent
JOB = HERE / "held_out_job.py"
ROUNDS = 3
VALIDATIONS_EVERY = 2  # steps of all workers
LAUNCH_S = 1200  # after which a launch has hung; what it has run stands
SOURCES = {
    "cnn": ("jobs/cnn.py:shapes", "0.06"), "charnn": ("topics", "0.03"), "nmt": ("jobs/nmt.py:numbers", "0.05"),
    "ranking": ("jobs/ranking.py:clicks", "0.06"),
}  # fmt: skip


def data(folder: Path) -> None:
    """Pack the data of all jobs where they look for them."""
    from held_out_job import SIZES

    mpitrain = str(Path(sys.executable).parent / "mpitrain")
    for name, (source, share) in SOURCES.items():
        if not (folder / name).exists():
            words = [mpitrain, "data", "pack", source, str(folder / name), "--validate", share]
            subprocess.run(
                words, check=True, env=os.environ | SIZES, cwd=HERE.parents[1], stdout=subprocess.DEVNULL
            )
    os.environ["PREDICTION_DATA"] = str(folder)


def links(folder: Path, condition: Condition) -> Path:
    """What the doctor says of the links of so many hosts at this rate."""
    path = folder / f"comm-{condition.hosts}-{condition.rate}.json"
    if not path.exists():
        mpitrain = str(Path(sys.executable).parent / "mpitrain")
        on_hosts(condition.rate, mpitrain, "doctor", "--comm", "--json", str(path), hosts=condition.hosts)
    return path


def load_for(condition: Condition) -> Any:
    """(the condition's job, how it is trained)."""
    from mpitrain.training.job_file import load_job

    os.environ["PREDICTION_JOB"] = condition.job
    job = load_job(str(JOB))
    return job, sys.modules[job.model.__module__].COURSE


def predict(condition: Condition, folder: Path, seeds: tuple[int, ...], strategies: tuple[str, ...]) -> None:
    """A row of each cell."""
    import torch

    from mpitrain.job import Overrides, apply_overrides
    from mpitrain.simulation.comparison import Comparison
    from mpitrain.values import parse

    torch.set_num_threads(1)  # as every rank has
    network = f'measured({json.dumps(str(links(folder, condition)))}, sharing="fair")'
    job, course = load_for(condition)
    runs: Comparison | None = None
    for strategy in strategies:
        number = num_workers(strategy, condition.hosts)
        found = []
        for seed in seeds:
            one = Overrides(
                run_dir=tempfile.mkdtemp(dir=folder), quiet=True, seed=seed, steps=course.steps,
                inject=condition.injections(course.base_s, number),
            )  # fmt: skip
            asked = replace(apply_overrides(job, one), validate_every=validate_every(course, number))
            if runs is None:  # the batches are measured once, with their sleeps
                os.environ.pop("PREDICTION_BASE_S", None)
                runs = Comparison(asked, one, parse("measured(4)", "compute"), parse(network, "network"))
                os.environ["PREDICTION_BASE_S"] = "0"  # from here on they are virtual
            runs.job, runs.options, runs.run_dir = asked, one, Path(one.run_dir)
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                (row,) = runs.run([parse(strategy, "strategy")], [number])["rows"]
            found.append({
                "sample_s": (row["virtual_s"] - row["paused_s"]) / row["samples"],
                "to_target_s": (row["to_target"] or {}).get("virtual_s"),
            })  # fmt: skip
        assert runs is not None
        simulated = medians(found)
        planned_s = plan(condition, course, strategy, number, network, runs.measured)
        ratio = planned_s / simulated["sample_s"]
        target_s = simulated["to_target_s"]
        planned = {"sample_s": planned_s, "to_target_s": None if target_s is None else target_s * ratio}
        cluster = asdict(parse(network, "network").cluster)
        show(condition, strategy, simulate=simulated, plan=planned)
        write_row("held_out", {
            "kind": "predicted", "condition": asdict(condition), "rule": strategy, "workers": number,
            "simulate": simulated, "plan": planned, "link": cluster, "measured": runs.measured,
        })  # fmt: skip


def plan(
    condition: Condition, course: Any, strategy: str, number: int, network: str, measured: dict[str, Any]
) -> float:
    """Seconds a sample as `mpitrain plan` predicts them."""
    from held_out_job import JITTER

    from mpitrain.planning.plan import Request, make_plan

    batch_s = measured["gradient_s"]
    asked = Request(
        str(JOB), workers=(number,), strategies=(strategy,), network=network, apply_s=measured["optimizer_s"],
        compute=condition.compute(batch_s, course.base_s, JITTER), read_s=0.0, fixed=0.0,
        backward=measured["backward_s"] / batch_s,
    )  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()):
        (curve,) = make_plan(asked)["curves"]
    return 1 / curve["points"][-1]["samples_per_s"]


def validate_every(course: Any, number: int) -> str:
    return f"{VALIDATIONS_EVERY * number * course.batch} samples"


def run(condition: Condition, folder: Path, left: tuple[str, ...], words: list[str]) -> None:
    """All rules of a condition that are left, in one launch, whose first rank writes a row of each cell."""
    command = [str(HERE / "held_out.py"), "ranks", "--only", str(condition.number), "--folder", str(folder)]
    on = [sys.executable, *command, "--strategies", *left, *words]
    start = "import sys; from prediction import on_hosts; on_hosts(sys.argv[1], *sys.argv[3:], hosts=int(sys.argv[2]))"
    where = [condition.rate, str(condition.hosts)]
    process = subprocess.Popen([sys.executable, "-c", start, *where, *on], cwd=HERE, start_new_session=True)
    try:
        code = process.wait(LAUNCH_S)
    except subprocess.TimeoutExpired:
        code = -1
    if code:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 15)
        print(f"{condition.title()}: the launch ended with {code}", flush=True)


def ranks(condition: Condition, strategies: tuple[str, ...], seeds: tuple[int, ...]) -> None:
    """On each of the hosts: train by one rule after the other."""
    import torch

    import mpitrain as mt
    from mpitrain.mpi.runtime import start
    from mpitrain.values import parse

    runtime = start()
    torch.set_num_threads(1)
    folder = Path(runtime.broadcast(tempfile.mkdtemp(prefix="held-out-") if runtime.rank == 0 else None))
    job, course = load_for(condition)

    def trained(strategy: str, seed: int, steps: int) -> dict[str, Any]:
        number = num_workers(strategy, condition.hosts)
        run_dir = folder / f"{strategies.index(strategy)}-{seed}-{steps}"
        asked = replace(job, validate_every=validate_every(course, number))
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            result = mt.train(
                asked, parse(strategy, "strategy"), run_dir=str(run_dir), quiet=True, seed=seed, steps=steps,
                inject=condition.injections(course.base_s, number),
            )  # fmt: skip
        runtime.barrier()
        if runtime.rank:
            return {}
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        began_s = next(row["t"] for row in rows if row["event"] == "start")
        met = [row["t"] - began_s for row in rows if row.get(course.metric, -math.inf) >= course.target]
        return {"sample_s": 1 / result["samples_per_second"], "to_target_s": met[0] if met else None}

    trained(strategies[0], 0, 3)  # the first run warms up
    for strategy in strategies:
        found = [trained(strategy, seed, course.steps) for seed in seeds]
        if runtime.rank == 0:
            measured = medians(found)
            show(condition, strategy, measured=measured)
            write_row("held_out", {
                "kind": "measured", "condition": asdict(condition), "rule": strategy, "steps": course.steps,
                "workers": num_workers(strategy, condition.hosts), "measured": measured,
            })  # fmt: skip
    runtime.finish()


def show(condition: Condition, strategy: str, **figures: dict[str, Any]) -> None:
    """Of one cell, in a line."""
    words = [
        f"{name} {1e3 * one['sample_s']:.3f} ms a sample, target "
        + ("missed" if one["to_target_s"] is None else f"{one['to_target_s']:.2f} s")
        for name, one in figures.items()
    ]
    print(f"{condition.title()}: {strategy}: {'; '.join(words)}", flush=True)


def main() -> int:
    """The command line."""
    parser = make_parser(__doc__, MEASUREMENT)
    parser.add_argument("what", choices=["publish", "links", "predict", "run", "ranks", "compare"])
    parser.add_argument("--seed", type=int, help="draw other conditions, for trying")
    parser.add_argument("--only", type=int, nargs="+", help="conditions, by number")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, help="runs of each cell, with the seeds 1, 2, ..."
    )
    parser.add_argument("--folder", type=Path, help="keep data and what the doctor has measured here")
    options = parser.parse_args()
    if options.what == "publish":
        publish(git("rev-parse", "HEAD"))
        return 0
    if options.what == "compare":
        print(told(list(rows_of("held_out")), table))
        return 0
    if options.seed is not None and "--record" in sys.argv:
        parser.error("--seed draws conditions for trying: they are not recorded")
    drawn = published() if options.seed is None else ("", options.seed, draw(options.seed))
    if drawn is None:
        parser.error(
            "no seed was published: commit the model, then `held_out.py publish`, or try with --seed"
        )
    if os.geteuid() != 0:
        parser.error("network namespaces need root")
    conditions = [one for one in drawn[2] if not options.only or one.number in options.only]
    strategies, seeds = tuple(options.strategies), tuple(range(1, options.rounds + 1))
    with tempfile.TemporaryDirectory(prefix="held-out-") as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        data(folder / "data")
        for condition in conditions:
            if options.what == "ranks":
                ranks(condition, strategies, seeds)
                continue
            done = cells_of(
                list(rows_of("held_out")), "predicted" if options.what == "predict" else "measured"
            )
            left = strategies
            if options.seed is None:
                left = tuple(one for one in strategies if (condition.number, one) not in done)
            if options.what == "links":
                print(links(folder, condition))
            elif options.what == "predict" and left:
                predict(condition, folder, seeds, left)
            elif left:
                words = ["--rounds", str(options.rounds)] + (["--record"] if "--record" in sys.argv else [])
                words += ["--seed", str(options.seed)] if options.seed is not None else []
                run(condition, folder, left, words)
    return 0


if __name__ == "__main__":
    sys.exit(main())
