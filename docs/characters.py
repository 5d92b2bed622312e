"""What each family of strategies does in virtual time: the runs behind the pictures of `docs/`.

    python docs/characters.py      writes docs/pictures/characters.json; about a minute, no MPI

Virtual time depends on no machine, so the file is the same wherever it is made. `runs` are curves, a figure for each
strategy and condition; `timelines` are traces of three workers, of which one is half as fast; `losses` are runs with
gradients, on handwritten digits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

import mpitrain as mt  # noqa: E402
from mpitrain.data.sources import load_source  # noqa: E402
from mpitrain.data.write.pack import PackOptions, pack  # noqa: E402
from mpitrain.training.job_file import load_job  # noqa: E402
from mpitrain.values import parse  # noqa: E402

RESULTS = ROOT / "docs" / "pictures" / "characters.json"
EQUAL, TAIL = "constant(1)", "shifted_exponential(0.5, 0.5)"
SLOW = "persistent(constant(1, 0.1), factors=(1, 1, 1, 1, 1, 1, 1, 4))"  # of every eight workers one is 4 times as slow
TIMELINES = (
    "allreduce()", "sync()", "backup(spare=1)", "async()", "ssp(bound=1)", "localsgd(period=2)",
    'decentralized(topology="ring")',
)  # fmt: skip
LOSSES = (
    "allreduce()",
    "backup(spare=1)",
    "async()",
    "ssp(bound=3)",
    "localsgd(period=16)",
    "decentralized(asynchronous=True)",
)


def model() -> torch.nn.Module:
    """Six million numbers: 25 MB of gradients."""
    return torch.nn.Sequential(torch.nn.Linear(512, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 1024))


def layers() -> torch.nn.Module:
    """Sixteen layers of one size, to be split."""
    return torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(16)))


def job(model: Callable[[], torch.nn.Module]) -> mt.Job:
    return mt.Job(
        model=model,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        loss=lambda model, batch: model(batch["x"]).square().mean(),
        data=mt.Synthetic(1 << 16, x=((512,), "float32")),
        epochs=1,
        batch_size=32,
    )


def timed(strategy: str, workers: int, compute: str, network: str = "ideal()", **more: Any) -> dict[str, Any]:
    """What a run without gradients finds."""
    made = job(layers if "pipeline" in strategy else model)
    with contextlib.redirect_stdout(io.StringIO()):
        return mt.simulate(
            made, parse(strategy, "strategy"), workers, parse(compute, "compute"), parse(network, "network"),
            timing_only=True, quiet=True, **more,
        )  # fmt: skip


def speed_ups() -> dict[str, list[tuple[float, float]]]:
    """Of `allreduce()` over one worker, by workers."""
    alone = timed("allreduce()", 1, EQUAL, steps=50)["samples_per_second"]
    return {
        name: [
            (
                workers,
                timed("allreduce()", workers, compute, "gbe10()", steps=50)["samples_per_second"] / alone,
            )
            for workers in (1, 2, 4, 8, 16, 32, 64)
        ]
        for name, compute in (("equal workers", EQUAL), ("now and then one is late", TAIL))
    }


def spares() -> dict[str, list[tuple[float, float]]]:
    """Of `backup`, by its spares, out of 16 workers."""
    found = [timed(f"backup(spare={spare})", 16, TAIL, steps=200) for spare in range(9)]
    first = found[0]["virtual_s"] / found[0]["version"]
    return {
        "time of an update (1: all are waited for)": [
            (at, one["virtual_s"] / one["version"] / first) for at, one in enumerate(found)
        ],
        "share of the gradients that are dropped": [
            (at, (one["late"] + one["dropped"]) / one["pushes"]) for at, one in enumerate(found)
        ],
    }


def staleness() -> dict[str, list[tuple[float, float]]]:
    """Share of the gradients that are at most so many versions old, with one of eight workers 4 times as slow."""
    curves = {}
    for strategy in ("async()", "softsync(updates=4)", "ssp(bound=3)", "bounded(staleness=3)"):
        counts = timed(strategy, 8, SLOW, steps=400)["staleness_histogram"]
        total, sum_, points = sum(counts.values()), 0, []
        for tau in range(33):
            sum_ += counts.get(str(tau), 0)
            points.append((tau, sum_ / total))
        curves[strategy] = points
    return curves


def periods() -> dict[str, list[tuple[float, float]]]:
    """Speed-up of `localsgd` on 8 workers over gigabit Ethernet, by its period."""
    alone = timed("allreduce()", 1, EQUAL, steps=64)["samples_per_second"]
    return {
        name: [
            (
                period,
                timed(f"localsgd(period={period}, wire='{wire}')", 8, EQUAL, "gbe1()", steps=128)[
                    "samples_per_second"
                ]
                / alone,
            )
            for period in (1, 2, 4, 8, 16, 32, 64)
        ]
        for name, wire in (("full numbers", "full"), ("8 bits", "int8"))
    }


def peers() -> dict[str, list[tuple[float, float]]]:
    """Speed-up over one worker over 10 Gbit/s, by peers, of which now and then one is late."""
    alone = timed("allreduce()", 1, TAIL, steps=60)["samples_per_second"]
    ways = {
        "full": "decentralized()",
        "ring": 'decentralized(topology="ring")',
        "ring, asynchronous": 'decentralized(topology="ring", asynchronous=True)',
    }
    return {
        name: [
            (workers, timed(strategy, workers, TAIL, "gbe10()", steps=60)["samples_per_second"] / alone)
            for workers in (2, 4, 8, 16, 32)
        ]
        for name, strategy in ways.items()
    }


def bubbles() -> dict[str, list[tuple[float, float]]]:
    """Share of a step in which a stage idles, by microbatches."""
    curves = {}
    for stages in (2, 4, 8):
        points = []
        for pieces in (1, 2, 4, 8, 16, 32):
            one = timed(
                f"pipeline(stages={stages}, microbatches={pieces}, schedule='gpipe')",
                stages,
                "constant(1, 0)",
                steps=4,
            )
            points.append((pieces, 1 - 1 / stages / (one["virtual_s"] / one["steps"])))
        curves[f"{stages} stages"] = points
    return curves


def losses() -> dict[str, list[tuple[float, float]]]:
    """Validation loss against virtual seconds: 8 workers of which one is 4 times as slow, 10 epochs of digits."""
    curves = {}
    with tempfile.TemporaryDirectory(prefix="characters-") as folder:
        pack(load_source("digits"), Path(folder) / "digits", PackOptions(0.2), source="digits")
        digits = load_job(str(ROOT / "jobs" / "digits.py"))
        data = mt.Shards(f"{folder}/digits/train-*.h5")
        digits = dataclasses.replace(
            digits, data=data, target={}, validate=mt.Shards(f"{folder}/digits/validate-*.h5")
        )
        for strategy in LOSSES:
            with contextlib.redirect_stdout(io.StringIO()):
                mt.simulate(
                    digits, parse(strategy, "strategy"), 8, parse(SLOW, "compute"), epochs=10, quiet=True,
                    run_dir=f"{folder}/run-{len(curves)}",
                )  # fmt: skip
            rows = [
                json.loads(line)
                for line in Path(f"{folder}/run-{len(curves)}/metrics.jsonl").read_text().splitlines()
            ]
            curves[strategy] = [
                (row["virtual_s"], row["validation_loss"]) for row in rows if "validation_loss" in row
            ]
    return curves


def timeline(strategy: str, workers: int = 3) -> dict[str, Any]:
    """The spans of every rank, and what went from whom to whom, in the first steps of all workers."""
    network = "link(gbit_per_s=1000, latency_s=0.12)"
    with tempfile.TemporaryDirectory(prefix="characters-") as folder:
        found = timed(
            strategy, workers, "persistent(constant(1, 0), factors=(1, 1.1, 2))", network, steps=6,
            run_dir=folder, trace="steps=0:6",
        )  # fmt: skip
        ranks = sorted(
            Path(folder).glob("trace-rank-*.json"), key=lambda path: int(path.stem.rpartition("-")[2])
        )
        lanes, messages = [], []
        for rank, path in enumerate(ranks):
            told = json.loads(path.read_text())
            events = told["traceEvents"] if isinstance(told, dict) else told
            lanes.append({"name": lane_name(rank, found["servers"]), "spans": list(spans(events))})
            messages += sent(events, rank)
    return {"lanes": lanes, "messages": sorted(messages, key=lambda one: one[3])}


def lane_name(rank: int, servers: int) -> str:
    return "server" if rank < servers else f"worker {rank - servers + 1}"


def spans(events: list[dict[str, Any]]) -> Iterator[list[Any]]:
    """[category, begin, end] in seconds of what a rank did."""
    for event in events:
        if event["ph"] == "X" and event.get("cat") in ("compute", "wait"):
            yield [event["cat"], event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6]


def sent(events: list[dict[str, Any]], rank: int) -> Iterator[list[Any]]:
    """[kind, from, to, begin, end] of messages; `to` is -1 where all take part."""
    begun: dict[str, dict[str, Any]] = {}
    for event in events:
        if event["ph"] == "b":
            begun[event["id"]] = event
        elif event["ph"] == "e" and (first := begun.pop(event["id"], None)):
            kind, _, to = first["name"].partition(" to ")
            yield [kind, rank, int(to) if to else -1, first["ts"] / 1e6, event["ts"] / 1e6]


RUNS: dict[str, Callable[[], dict[str, list[tuple[float, float]]]]] = {
    "allreduce": speed_ups,
    "parameter-servers": spares,
    "asynchronous-servers": staleness,
    "local-sgd": periods,
    "decentralized": peers,
    "split-models": bubbles,
    "losses": losses,
}


def rounded(value: Any) -> Any:
    """Numbers to five digits, through lists and dictionaries."""
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(one) for one in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def recorded() -> dict[str, Any]:
    """What the pictures are drawn from."""
    return json.loads(RESULTS.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def main() -> None:
    torch.set_num_threads(1)
    found = {
        "runs": {name: run() for name, run in RUNS.items()},
        "timelines": {text: timeline(text) for text in TIMELINES},
    }
    RESULTS.parent.mkdir(exist_ok=True)
    lines = ",\n".join(
        f'"{part}": {{\n'
        + ",\n".join(f"{json.dumps(key)}: {json.dumps(rounded(one))}" for key, one in rows.items())
        + "\n}"
        for part, rows in found.items()
    )
    RESULTS.write_text("{\n" + lines + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
