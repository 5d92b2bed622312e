"""Snapshots of what users read: the help of every command, every refusal of a strategy, and `docs/features.md`.

    python -m tests.snapshots --record DIR
    python -m tests.snapshots --compare DIR     # exit code 1 where anything differs; it says what

`helps/` has a file for each command. `refusals.txt` has the answers to three kinds of questions, for strategies that
are made of every family and up to three of its options, in sets that are numbered by their digest, each with one
example of a strategy; `strategies.txt.gz` says for every strategy which sets are its answers:

- `asked`: feature x strategy, why a strategy cannot do it (`asked`);
- `checked`: feature x strategy x world, what the checks of that world say of a job that asks for the feature
  (`checked`; of strategies with up to two options);
- `made`: strategy, why there is no such value.

Only `asked` and `checked` know how the package is asked. Where the package changes that, they are pointed to what takes
its place, and the answers stay.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import hashlib
import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import mpitrain as mt
from mpitrain.cli.common.parser import Parser
from mpitrain.cli.main import build_parser
from mpitrain.errors import UsageError
from mpitrain.job import Job, Overrides
from mpitrain.job.asked import check
from mpitrain.strategies.base import Strategy
from mpitrain.strategies.features import LOOP, MPI, THREADS, VIRTUAL, WORLDS, why_not
from mpitrain.training.validate import check_precision, validate_run, validate_simulation
from mpitrain.values import names, parse
from tests import toy
from tests.mpi import splits

ROOT = Path(__file__).parents[1]
NUM_WORKERS = 4
MOST_SHOWN = 40
NUM_DIGITS = 10
ALONE, WORKS = "nothing", "not refused"
Answers = dict[str, str]  # question -> answer, of those that are not empty

# Option -> values besides its default.
_SERVED: dict[str, tuple[str, ...]] = {
    "servers": ("2",),
    "damping": ("inverse()", "power(1.0)", "drop(limit=2)", "delay_compensated()", "gap_aware()"),
    "warmup": ("warmup(epochs=1)",),
    "push_wire": ("'bfloat16'", "topk()", "onebit()", "powersgd()"),
    "reply_wire": ("'float16'", "eightbit()"),
    "optimizer": ("'worker'",),
    "push_every": ("2",),
    "pull_every": ("2",),
    "inflight": ("2",),
    "batching": ("per_round()", "by_speed()"),
    "placement": ("'packed'",),
    "aggregate": ("'node'",),
}
_CODECS = (
    "float16()", "bfloat16()", "eightbit()", "onebit()", "threshold()", "threshold(momentum=0.9,clip=1.0)", "topk()",
    "powersgd()", "qsgd()",
)  # fmt: skip
OPTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "allreduce": {"codec": _CODECS},
    "localsgd": {
        "period": ("2",), "unit": ("'samples'",), "start": ("2",), "average_optimizer": ("True",),
        "average_buffers": ("False",), "outer": ("slowmo()", "diloco()"),
        "wire": ("'float16'", "'bfloat16'", "'int8'"),
    },
    "decentralized": {
        "topology": ("'ring'", "'torus'", "'exponential'"), "codec": _CODECS, "asynchronous": ("True",),
        "resync": ("2",), "warmup": ("warmup(epochs=1)",), "gamma": ("0.5",),
    },
    "sync": _SERVED,
    "backup": _SERVED | {"spare": ("0", "2"), "stragglers": ("'abort'",)},
    "hybrid": _SERVED | {"tables": ("'servers'",)},
    "async": _SERVED,
    "softsync": _SERVED | {"updates": ("3",), "blocking": ("True",)},
    "ssp": _SERVED | {"bound": ("0", "1")},
    "bounded": _SERVED | {"staleness": ("1",)},
    "elastic": _SERVED | {"moving_rate": ("0.5",)},
    "pipeline": {
        "stages": ("3",), "microbatches": ("2", "6"), "schedule": ("'gpipe'",), "together": ("'stages'",),
    },
    "tensor": {"parallel": ("4",)},
    "sharded": {"replicas": ("2",)},
}  # fmt: skip
MOST_OPTIONS, MOST_CHECKED_OPTIONS = 3, 2

# Features that a strategy is asked for by name.
ASKED = {
    "clip_norm": ("clip_norm", MPI),
    "clip_value": ("clip_value", MPI),
    "accumulate": ("accumulate", MPI),
    "sync_batchnorm": ("sync_batchnorm", MPI),
    "in_place": ("changes in place", MPI),
    "step": ("step", MPI),
    "sparse": ("sparse", MPI),
    "served": ("served", MPI),
    "patience": ("patience", MPI),
    "over_mpi": ("over MPI", MPI),
    "wrapped": ("own loop", LOOP),
}
# Features that a job asks for: its fields, and options of the command line.
CHECKED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    ALONE: ({}, {}),
    "clip_norm": ({"clip_norm": 1.0}, {}),
    "clip_value": ({"clip_value": 1.0}, {}),
    "accumulate": ({"accumulate": 3}, {}),
    "accumulate, find_unused_parameters": ({"accumulate": 3, "find_unused_parameters": True}, {}),
    "sync_batchnorm": ({"sync_batchnorm": True}, {}),
    "step": ({**toy.BY_TURNS, "stages": None, "tensor_plan": {}}, {}),
    "patience": ({"patience": 1}, {}),
    "precision=float16": ({"precision": "float16"}, {}),
    "on_nonfinite=skip": ({"on_nonfinite": "skip"}, {}),
    "validate_every=60s": ({"validate_every": "60s"}, {}),
    "trace": ({"trace": "steps=1:2"}, {}),
    "log=mllog": ({"log": "mllog"}, {}),
    "heartbeat_s": ({}, {"heartbeat_s": 1.0}),
    "batch_size=7": ({"batch_size": 7}, {}),
    "inject=slow": ({}, {"inject": ("slow(worker=1, factor=3)",)}),
    "inject=nan": ({}, {"inject": ("nan(worker=1, at_step=1)",)}),
    "inject=kill": ({}, {"inject": ("kill(worker=1, at_step=1)",)}),
    "inject=raise": ({}, {"inject": ("raise(worker=1, at_step=1)",)}),
    "inject=slow_reader": ({}, {"inject": ("slow_reader(worker=1, seconds=0.1)",)}),
}


def asked(feature: str, strategy: Strategy) -> str:
    """Empty, or why this strategy cannot do it."""
    return why_not(ASKED[feature][0], strategy, ASKED[feature][1])


def checked(job: Job, overrides: Overrides, world: str) -> None:
    """What a world checks of a job before it begins.

    Raises:
        UsageError: why not.
    """
    strategy = job.strategy
    assert strategy is not None
    if world == VIRTUAL:
        if strategy.splits_model:  # the record was made before faults of its workers were asked about here
            kept = tuple(one for one in overrides.inject if one.startswith(("nan", "slow_reader")))
            overrides = dataclasses.replace(overrides, inject=kept)
        validate_simulation(job, overrides, NUM_WORKERS)
        return
    if world == LOOP:
        if why := asked("wrapped", strategy):
            raise UsageError(f"{strategy}: {why}")
        return
    if world == THREADS:
        check(job, overrides, THREADS, NUM_WORKERS)
    check_precision(job, torch.device("cpu"))
    validate_run(job, overrides, NUM_WORKERS)
    strategy.check_workers(NUM_WORKERS)


def texts(most: int) -> Iterator[str]:
    """Every family with up to so many of its options away from their defaults."""
    assert set(OPTIONS) == set(names("strategy")), "a family is missing"
    for name, options in OPTIONS.items():
        for number in range(most + 1):
            for keys in itertools.combinations(options, number):
                for values in itertools.product(*(options[key] for key in keys)):
                    yield f"{name}({', '.join(map('='.join, zip(keys, values, strict=True)))})"


def refusals() -> Iterator[tuple[str, str, Answers]]:
    """(strategy, kind of question, answers)."""
    jobs = {
        feature: (splits.changed(splits.deep_job(), strategy=mt.AllReduce(), **fields), Overrides(**options))
        for feature, (fields, options) in CHECKED.items()
    }
    few = set(texts(MOST_CHECKED_OPTIONS))
    for text in texts(MOST_OPTIONS):
        try:
            strategy = parse(text, "strategy")
        except UsageError as error:
            yield text, "made", {"made": str(error)}
            continue
        assert isinstance(strategy, Strategy)
        yield text, "asked", _told(strategy, {feature: asked(feature, strategy) for feature in ASKED})
        if text in few:
            yield text, "checked", _told(strategy, dict(_checks(strategy, jobs)))


def _checks(strategy: Strategy, jobs: Mapping[str, tuple[Job, Overrides]]) -> Iterator[tuple[str, str]]:
    """What a feature adds to what a world says of the strategy alone; a loop of one's own has no job."""
    alone: dict[str, str] = {}
    for feature, (job, overrides) in jobs.items():
        asking = splits.changed(job, strategy=strategy)
        for world in WORLDS if feature == ALONE else WORLDS[:-1]:
            text = ""
            try:
                checked(asking, overrides, world)
            except UsageError as error:
                text = str(error)
            if feature == ALONE:
                alone[world] = text
            if feature == ALONE or text != alone[world]:
                yield f"{feature} in {world}", text


def _told(strategy: Strategy, answers: Mapping[str, str]) -> Answers:
    """Those with a reason, in which the strategy itself stands as a word that all have in common."""
    return {question: text.replace(str(strategy), "{strategy}") for question, text in answers.items() if text}


def helps() -> dict[str, str]:
    """Command -> its help, at 80 columns."""
    found = {}

    def walk(parser: argparse.ArgumentParser) -> None:
        found[parser.prog] = parser.format_help()
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for command in action.choices.values():
                    assert isinstance(command, Parser)
                    walk(command)

    walk(build_parser())
    return found


def collect() -> dict[str, bytes]:
    """File -> content of a whole snapshot."""
    files = {f"helps/{name.replace(' ', '-')}.txt": text.encode() for name, text in helps().items()}
    files["features.md"] = (ROOT / "docs" / "features.md").read_bytes()
    sets: dict[str, tuple[str, str, Answers]] = {}
    rows: dict[str, list[str]] = {}
    num_questions = 0
    for strategy, kind, answers in refusals():
        digest = hashlib.sha256(json.dumps([kind, answers], sort_keys=True).encode()).hexdigest()[:NUM_DIGITS]
        sets.setdefault(digest, (strategy, kind, answers))
        rows.setdefault(strategy, []).append(f"{kind}={digest}")
        num_questions += {"asked": len(ASKED), "checked": len(CHECKED) * (len(WORLDS) - 1) + 1, "made": 1}[
            kind
        ]
    files |= refusal_files(rows, sets)
    print(
        f"{len(helps())} helps, {len(rows)} strategies, {num_questions} questions, {len(sets)} different sets of "
        "answers"
    )
    return files


def refusal_files(
    rows: Mapping[str, Sequence[str]], sets: Mapping[str, tuple[str, str, Answers]]
) -> dict[str, bytes]:
    """Of each strategy which sets are its answers, and the sets."""
    whose = [f"{strategy}\t{' '.join(row)}\n" for strategy, row in rows.items()]
    lines = []
    for digest, (strategy, kind, answers) in sets.items():
        lines.append(f"{digest} {kind}, such as {strategy}")
        lines += [f"    {question}: {json.dumps(text)}" for question, text in answers.items()]
    return {
        "strategies.txt.gz": gzip.compress("".join(whose).encode(), mtime=0),
        "refusals.txt": ("\n".join(lines) + "\n").encode(),
    }


def differences(recorded: Mapping[str, bytes], seen: Mapping[str, bytes]) -> Iterator[str]:
    """File by file; of refusals, strategy and question."""
    for name in sorted(recorded.keys() | seen.keys()):
        old, new = recorded.get(name), seen.get(name)
        if name == "refusals.txt" or old == new:
            continue
        if old is None or new is None:
            yield f"{name}: {'is new' if old is None else 'is gone'}"
        elif name == "strategies.txt.gz":
            yield from _differing_answers(recorded, seen)
        else:
            pairs = itertools.zip_longest(old.decode().splitlines(), new.decode().splitlines())
            number, (was, now) = next(
                (at, pair)
                for at, pair in enumerate([*pairs, ("", "")], 1)
                if pair[0] != pair[1] or pair == ("", "")
            )
            yield f"{name}:{number}: was {was!r}, is {now!r}"


def _differing_answers(recorded: Mapping[str, bytes], seen: Mapping[str, bytes]) -> Iterator[str]:
    (old_rows, old_sets), (new_rows, new_sets) = _read(recorded), _read(seen)
    alike: dict[tuple[str, str, str], list[str]] = {}
    for strategy in sorted(old_rows.keys() | new_rows.keys()):
        old, new = old_rows.get(strategy, {}), new_rows.get(strategy, {})
        for kind in sorted(old.keys() | new.keys()):
            if old.get(kind) != new.get(kind):
                alike.setdefault((kind, old.get(kind, ""), new.get(kind, "")), []).append(strategy)
    for (kind, before, after), strategies in alike.items():
        was, now = old_sets.get(before, {}), new_sets.get(after, {})
        whose = strategies[0] + (f" and {len(strategies) - 1} more" if len(strategies) > 1 else "")
        for question in [*was, *(now.keys() - was.keys())] or [kind]:
            if was.get(question) != now.get(question) or not before or not after:
                yield f"{whose}: {kind}: {question}: was {was.get(question, WORKS)}, is {now.get(question, WORKS)}"


def _read(files: Mapping[str, bytes]) -> tuple[dict[str, dict[str, str]], dict[str, dict[str, str]]]:
    """strategy -> kind -> digest, and digest -> question -> answer."""
    rows = {}
    for line in gzip.decompress(files["strategies.txt.gz"]).decode().splitlines():
        strategy, _, kinds = line.partition("\t")
        rows[strategy] = dict(kind.split("=") for kind in kinds.split())
    sets: dict[str, dict[str, str]] = {}
    answers: dict[str, str] = {}
    for line in files["refusals.txt"].decode().splitlines():
        if line.startswith("    "):
            question, _, text = line.strip().partition(": ")
            answers[question] = text
        else:
            answers = sets[line[:NUM_DIGITS]] = {}
    return rows, sets


def main(argv: Iterable[str] | None = None) -> int:
    """Record or compare; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.snapshots", description="snapshots of what users read"
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--record", type=Path, metavar="DIR")
    what.add_argument("--compare", type=Path, metavar="DIR")
    arguments = parser.parse_args(argv if argv is None else list(argv))
    seen = collect()
    if arguments.record:
        for name, content in seen.items():
            path = arguments.record / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return 0
    folder: Path = arguments.compare
    recorded = {
        str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }
    found = list(differences(recorded, seen))
    print("\n".join(found[:MOST_SHOWN]) or "all is the same to the byte")
    if len(found) > MOST_SHOWN:
        print(f"and {len(found) - MOST_SHOWN} more")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
