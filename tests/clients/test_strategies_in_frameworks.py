"""Strategies from inside Lightning, Accelerate and Hugging Face's Trainer: with one worker the serial run of plain
torch, with two what plain torch makes of the gradients that they saw, and what is resumed is what would have been.

The frameworks need an environment of their own (`make clients`); what was compared goes to `tests/clients.txt`.
"""

import importlib
import importlib.util
import json
import os
from pathlib import Path

import pytest

from tests.clients import oracles
from tests.ranks import find_mpi, run_ranks

PROGRAMS = Path(__file__).parent / "programs"
FRAMEWORKS = ["lightning", "accelerate", "transformers"]
ASYNC, SYNC, LOCAL = "async(servers=1)", "sync(servers=1)", "localsgd(period=2)"
# ranks -> strategies, all in one process where no server leaves with the first
LAUNCHES = {
    1: [["allreduce()", LOCAL, "decentralized()"]],
    2: [["plain", "allreduce()", LOCAL], [ASYNC], [SYNC]],
    3: [[ASYNC], [SYNC]],
}
ORACLES = {
    "allreduce()": oracles.averaged,
    "plain": oracles.averaged,
    LOCAL: oracles.averaged_now_and_then,
    SYNC: oracles.clipped_by_worker,
    ASYNC: oracles.replayed,
    "decentralized()": oracles.averaged,
}
NEVER_RESUMED = [("plain", 2), (ASYNC, 3)]  # the framework's own; and two that do not wait for each other


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_without_the_framework_the_extra_is_named(name):
    if importlib.util.find_spec(name) is not None:
        pytest.skip(f"{name} is installed")
    with pytest.raises(ImportError, match=rf"pip install 'mpitrain\[{name}\]'"):
        importlib.import_module(f"mpitrain.frameworks.{name}")


@pytest.fixture(scope="module", params=FRAMEWORKS)
def framework(request):
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed: make clients")
    return request.param


@pytest.fixture(scope="module")
def told(framework, tmp_path_factory):
    """(strategy, ranks, whether resumed) -> what each worker printed."""
    path = tmp_path_factory.mktemp(framework)
    found = {}
    for ranks, launches in LAUNCHES.items():
        for strategies in launches:
            whole = [_run(path, one, ranks) for one in strategies]
            again = [
                {**run, "name": [*run["name"][:2], True], "resume": run["save"]}
                for run in whole
                if tuple(run["name"][:2]) not in NEVER_RESUMED
            ]
            for run in again:
                run["save"] += "-resumed"
            if (
                "plain" in strategies and framework != "accelerate"
            ):  # which names a DDP model's parameters otherwise
                again.append(
                    {
                        **whole[1],
                        "name": [*whole[1]["name"][:2], "DDP"],
                        "resume": whole[0]["save"],
                        "save": whole[1]["save"] + "-ddp",
                    }
                )
            served = strategies[0] in (ASYNC, SYNC)  # whose servers leave with the end of a run
            for runs in [whole, again] if served else [[*whole, *again]]:
                found |= _launch(framework, ranks, runs)
    return found


def _run(path, strategy, ranks):
    run = {"name": [strategy, ranks, False], "strategy": strategy, "save": str(path / f"{strategy}-{ranks}")}
    return {**run, "plain": True} if strategy == "plain" else run


def _started(framework, ranks, runs):
    argv = [str(find_mpi("openmpi")[0]), str(PROGRAMS / f"{framework}_strategies.py"), json.dumps(runs)]
    return run_ranks(ranks, argv, timeout_s=400)


def _launch(framework, ranks, runs):
    if not runs:
        return {}
    result = _started(framework, ranks, runs).check()
    found = {}
    for text in result.ranks_out:
        for line in text.splitlines():
            if line.startswith("RUN "):
                one = json.loads(line[4:])
                found.setdefault(tuple(one["run"]), []).append(one)
    assert len(found) == len(runs), result
    return found


def _workers(told, strategy, ranks, resumed=False):
    workers = sorted(told[strategy, ranks, resumed], key=lambda one: one["rank"])
    assert [one["rank"] for one in workers] == list(range(workers[0]["workers"]))
    assert workers[0]["workers"] == ranks - (strategy in (ASYNC, SYNC))
    return workers


def _farthest(one, other):
    assert len(one) == len(other) > 100
    return max(abs(a - b) for a, b in zip(one, other))


EVERY = [(strategy, ranks) for ranks, launches in LAUNCHES.items() for some in launches for strategy in some]


@pytest.mark.parametrize(("strategy", "ranks"), EVERY)
def test_plain_torch_comes_to_the_same(told, framework, strategy, ranks):
    """Data is divided, rates change, gradients are clipped and accumulated: the rows say what each step was made of."""
    workers = _workers(told, strategy, ranks)
    rows = [one["rows"] for one in workers]
    seen = sorted(number for one in rows for row in one for part in row["samples"] for number in part)
    assert seen == sorted(2 * list(range(len(seen) // 2))) and len({row["rate"] for row in rows[0]}) > 1
    assert workers[0]["measured"].get("one", len(workers)) == pytest.approx(len(workers))
    difference = max(_farthest(one["final"], ORACLES[strategy](rows)) for one in workers)
    note(framework, strategy, len(workers), "plain torch", difference)
    assert difference < 1e-12


@pytest.mark.parametrize(("strategy", "ranks"), [one for one in EVERY if one not in NEVER_RESUMED])
def test_what_is_resumed_is_what_would_have_been(told, framework, strategy, ranks):
    whole, again = (_workers(told, strategy, ranks, resumed) for resumed in (False, True))
    assert len(again[0]["rows"]) == len(whole[0]["rows"]) // 2
    difference = max(_farthest(one["final"], other["final"]) for one, other in zip(whole, again))
    note(framework, strategy, len(whole), "resumed after half", difference)
    assert difference == 0


def test_a_checkpoint_of_the_frameworks_own_ddp_is_gone_on_from(told, framework):
    if framework == "accelerate":
        pytest.skip("Accelerate names a DDP model's parameters otherwise")
    whole, again = (_workers(told, *run) for run in (("plain", 2), ("allreduce()", 2, "DDP")))
    difference = max(_farthest(one["final"], other["final"]) for one, other in zip(whole, again))
    note(framework, "allreduce()", len(whole), "resumed DDP's", difference)
    assert difference == 0


@pytest.mark.parametrize("strategy", ["allreduce()", ASYNC])
def test_an_error_on_one_worker_ends_the_job(framework, strategy):
    run = {"name": [strategy, 3, False], "strategy": strategy, "fails": True}
    result = _started(framework, 3, [run])
    assert result.code == 1 and "ValueError: on purpose" in result.stderr, result
    assert "RUN " not in result.stdout


def note(framework, strategy, workers, beside, difference):
    """A row of the table that `make clients` commits."""
    if place := os.environ.get("MPITRAIN_CLIENTS_TABLE"):
        name = "the framework's own DDP" if strategy == "plain" else strategy
        with Path(place).open("a") as file:
            file.write(f"{framework:15} {name:24} {workers} worker(s)  {beside:20} {difference:.1e}\n")
