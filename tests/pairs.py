"""All pairs of features that a job can name, each on one small job under one strategy: `python -m tests.pairs` runs
them and writes `pairs.txt`, of which `test_pairs.py` runs a sample.

A pair works, or is refused by name; anything else fails. The features are those of `docs/features.py` and further
fields of a job. The strategies take turns among those under which each of the two works alone; where there is none, the
one without the other is refused already. Runs in virtual time are in this process, others on two ranks, in one launch
for as long as nothing ends it.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

import mpitrain as mt
from docs.features import FEATURES, Feature, Row
from mpitrain.errors import UsageError
from mpitrain.strategies.allreduce import AllReduce
from mpitrain.strategies.model_parallel.base import Split
from mpitrain.values import parse
from tests import toy
from tests.mpi import splits
from tests.mpi.cases import launch_program
from tests.ranks import RanksHung, Result

AT_ONCE = 30  # pairs of a launch
TABLE = Path(__file__).parent / "pairs.txt"
STRATEGIES = (
    "allreduce()", "sync()", "sharded()", "async(servers=2)", "tensor(parallel=2)", "localsgd(period=2)",
    "pipeline(microbatches=2)", "decentralized()", "softsync(updates=2)", "ssp(bound=3)", "backup()",
    "bounded(staleness=2)", "elastic(push_every=2)",
)  # fmt: skip
MORE = (
    Feature("drop_last", {"drop_last": True}, ()),
    Feature("on_nonfinite", {"on_nonfinite": "skip"}, ()),
    Feature("schedule", {"schedule": "gradual"}, ()),
    Feature("find_unused_parameters", {"find_unused_parameters": True}, ()),
    Feature(
        "sparse_as_dense",
        {"sparse_as_dense": True, "model": "looked up"},
        (Row(("pipeline()", "tensor()"), "the small model has neither stages nor layers to slice", "the model"),),
    ),
    Feature("target", {"target": {"validation_loss": "<1e9"}}, ()),
    Feature("init", {"init": "itself"}, ()),
    Feature("log", {"log": "csv"}, ()),
    Feature("checkpoint_every", {"checkpoint_every": "12 samples"}, ()),
    Feature("loss=(sum, weight)", {"loss": "weighted"}, ()),
    Feature("several batches of other sizes", {"batch_size": 5}, ()),
)  # fmt: skip
# a form of the data, which enters a loss and a transform of its own; and a scheduler of another kind
ALONE = ("x, y = batch", "scheduler=ReduceLROnPlateau")
ALL = (*(one for one in FEATURES if one.name not in ALONE), *MORE)
LAST_WINS = ("keep_best", "validate_every", "epochs", "ema", "optimizer", "batch_size")
BOTH_MODELS = {
    frozenset({"normed", "looked up"}): "looked up, normed",
    frozenset({"normed", "served"}): "served, normed",
}
OTHERS = {
    "schedule": {"gradual": mt.Gradual(epochs=1)},
    "loss": {"weighted": toy.weighted_loss},
}
PAIRS = tuple(itertools.combinations(range(len(ALL)), 2))


class Pair(NamedTuple):
    """Two features, and what they make of a job; `field`: which one they both name, where there is one."""

    first: Feature
    second: Feature
    text: str
    fields: dict[str, Any]
    field: str = ""

    @property
    def name(self) -> str:
        return f"{self.first.name} | {self.second.name}"

    @property
    def is_virtual(self) -> bool:
        return not isinstance(parse(self.text, "strategy"), AllReduce | Split)


def pair(number: int) -> Pair:
    """The pair of this number."""
    first, second = (ALL[index] for index in PAIRS[number])
    text = _strategy(first, second, number)
    fields = first.fields | second.fields
    for key in first.fields.keys() & second.fields.keys():
        one, other = first.fields[key], second.fields[key]
        if key == "model" and one != other:
            fields[key] = BOTH_MODELS.get(frozenset({one, other}), "")
        if key not in LAST_WINS and one != other and not fields[key]:
            return Pair(first, second, text, {}, key)
        if key in ("data", "precision") and one != other:
            return Pair(first, second, text, {}, key)
    return Pair(first, second, text, fields)


def _strategy(first: Feature, second: Feature, turn: int) -> str:
    order = [STRATEGIES[(turn + place) % len(STRATEGIES)] for place in range(len(STRATEGIES))]
    return min(order, key=lambda text: (_refuses(first, text) + _refuses(second, text), order.index(text)))


def _refuses(feature: Feature, text: str) -> bool:
    if not feature.rows:
        return False
    name = text.partition("(")[0]
    named = [
        (row.said, text in row.strategies)
        for row in feature.rows
        if any(one.partition("(")[0] == name for one in row.strategies)
    ]
    exactly = [said for said, is_exact in named if is_exact]
    return bool((exactly or [said for said, _ in named] or [""])[0])


def make_job(one: Pair, init: Path) -> mt.Job:
    """The small job of a pair."""
    fields = toy.scheduled(one.fields)
    fields |= {key: named[fields[key]] for key, named in OTHERS.items() if isinstance(fields.get(key), str)}
    if "init" in fields:
        fields["init"] = _itself(fields.get("model"), init)
    base = {
        "model": lambda: splits.Deep().float(), "loss": toy.square_loss, "batch_size": 6, "optimizer": _gently,
    }  # fmt: skip
    return splits.changed(splits.deep_job(), **(base | fields))


def _gently(parameters: Any) -> Any:
    """Converges under stale gradients, too."""
    return torch.optim.SGD(parameters, lr=0.005, momentum=0.5)


def _itself(model: Any, path: Path) -> str:
    """A file with the weights of another model of this kind."""
    from mpitrain.training.measure import save_model

    if not path.exists():
        save_model(model() if callable(model) else splits.Deep().float(), path, {})
    return str(path)


def outcome(one: Pair, run_dir: Path) -> str:
    """What is written of a run that has come to its end."""
    result = json.loads((run_dir / "result.json").read_text())
    if result["status"] != "ok":
        return f"FAILED: status={result['status']}"
    for feature in (one.first, one.second):
        if feature.leaves and not (run_dir / feature.leaves).is_file():
            return f"FAILED: {feature.name} has left no {feature.leaves}"
        if feature.measures and feature.measures not in result["metrics"]:
            return f"FAILED: {feature.name} has measured no {feature.measures}"
    return "works"


def refused(error: BaseException) -> str:
    """What is written of a refusal."""
    text = " ".join(str(error).split())
    return "refused: " + text.rpartition("UsageError: ")[2][:110]


def simulated(one: Pair, folder: Path) -> str:
    """The outcome of a pair in virtual time."""
    strategy: Any = parse(one.text, "strategy")
    try:
        mt.simulate(
            make_job(one, folder / "init.safetensors"), strategy, 3, run_dir=str(folder / "run"), quiet=True
        )
    except UsageError as error:
        return refused(error)
    except Exception as error:
        return f"FAILED: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return outcome(one, folder / "run")


def launched(numbers: list[int], folder: Path) -> Iterator[tuple[int, str]]:
    """The outcomes of pairs on two ranks; a launch that a pair has ended is followed by one of the rest."""
    left = list(numbers)
    while left:
        run = _launch(left[:AT_ONCE], folder)
        told = [json.loads(line[5:]) for line in run.ranks_out[0].splitlines() if line.startswith("pair ")]
        yield from ((number, text) for number, text in told)
        left = left[len(told) :]
        if run.code:
            yield left.pop(0), _ended(run)


def _launch(numbers: list[int], folder: Path) -> Result:
    try:
        return launch_program(2, "pair_runs", str(folder), *map(str, numbers), cwd=folder, timeout_s=900)
    except RanksHung as hung:
        return hung.result


def _ended(result: Result) -> str:
    lines = result.stderr.splitlines()
    own = [
        one.partition("UsageError: ")[2] for one in lines if one.startswith("[rank") and "UsageError: " in one
    ]
    if own:
        return refused(UsageError(own[-1]))
    last = " ".join(one for one in lines if "Error: " in one)[:200]
    return f"FAILED: exit code {result.code} {last}"


def run(numbers: Iterable[int]) -> dict[int, str]:
    """The outcome of each of these pairs."""
    pairs = {number: pair(number) for number in numbers}
    found = {number: f"one field: {one.field}" for number, one in pairs.items() if one.field}
    with tempfile.TemporaryDirectory() as name:
        real = [number for number, one in pairs.items() if number not in found and not one.is_virtual]
        virtual = [number for number, one in pairs.items() if number not in found and one.is_virtual]
        with ThreadPoolExecutor(1) as thread:
            on_ranks = thread.submit(lambda: dict(launched(real, Path(name))))
            for number in virtual:
                with tempfile.TemporaryDirectory(dir=name) as folder:
                    found[number] = simulated(pairs[number], Path(folder))
            found |= on_ranks.result()
    return found


def line(number: int, text: str) -> str:
    """A row of the table."""
    one = pair(number)
    return f"{one.name} | {one.text} | {text}"


def main() -> int:
    """Run all pairs, or those whose row has one of the texts of the command line; the table is written of all."""
    chosen = [
        number for number in range(len(PAIRS)) if all(word in line(number, "") for word in sys.argv[1:])
    ]
    found = run(chosen)
    rows = [line(number, found[number]) for number in sorted(found)]
    if len(sys.argv) == 1:
        TABLE.write_text("\n".join(rows) + "\n")
    failed = [row for row in rows if "| FAILED" in row]
    print("\n".join(failed if len(sys.argv) == 1 else rows))
    works = sum(row.endswith("| works") for row in rows)
    print(
        f"{len(rows)} pairs: {works} work, {sum('| refused' in row for row in rows)} are refused, {len(failed)} fail"
    )
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
