"""Every option, changed between a run and its resume: what is accepted acts, and what cannot act is refused."""

import dataclasses
import json
from typing import Any, NamedTuple

import pytest

from mpitrain import Job
from mpitrain.cli import main as cli
from mpitrain.job import Overrides
from mpitrain.job.option import ACTS, CONVERTED, REFUSED
from mpitrain.strategies.checkpoint_policy import read_policy
from mpitrain.training.resuming.resume_options import ON_RESUME
from tests.mpi.cases import launch_program
from tests.ranks import ROOT
from tests.sampling import ALL_CELLS, cells

SAMPLES = 52  # on three workers with batches of 4: four rounds of 12, and one of 4; checkpoints after 3, 5, 8 and 10


class Case(NamedTuple):
    """One resume: `entry` of the table, the `strategy` now, changed fields of the job and `options` as source, `base`:
    (strategy, changes) before, where they are others; `acts`: whether it did, from what came out of it and of the
    unchanged resume; or what is `said` by the refusal."""

    entry: str
    strategy: str
    changes: str = ""
    options: str = ""
    acts: Any = None
    said: tuple[str, ...] = ()
    at: str = "mid"
    base: tuple[str, ...] = ()


def moved(run, plain):
    return (
        run["model"] != plain["model"]
        and run["result"]["samples"] == plain["result"]["samples"] == 2 * SAMPLES
    )


def stayed(run, plain):
    return finished(run, plain) and not moved(run, plain)


def finished(run, plain):
    return run["code"] == 0 and run["result"]["samples"] == 2 * SAMPLES


ALL = "allreduce()"
LOCKSTEP = [ALL, "localsgd(period=2)", "decentralized()", "sharded()"]
FAMILIES = [
    *LOCKSTEP, "sync()", "async()", "async(optimizer='worker')", "async(push_every=2)", "elastic(push_every=2)",
    "decentralized(topology='ring')", "pipeline(stages=3)", "tensor(parallel=3)",
]  # fmt: skip


def steps_of(run):
    return [row["step"] for row in run["events"] if row["event"] == "progress"]


def validations_of(run):
    return [row["samples"] for row in run["events"] if row["event"] == "validation"]


def kept_best(run, plain):
    return "model-best.safetensors" in run["files"] and run["result"]["best"]["value"] is not None


MEASURED = "validate=toy.Memory()"
START = "init=root / 'start.safetensors'"

BY_METRIC = (
    f"{MEASURED}, validate_every='13 samples', scheduler=toy.BY_METRIC['no better'], "
    "metrics=lambda m, b: {'one': 9.0}"
)
TURNS = "optimizer={'0': sgd, '2': sgd}"

CASES = [
    Case("loss", ALL, "loss=absolute", acts=moved),
    Case(
        "options",
        ALL,
        "options={'model.dropout': 0.5}",
        acts=lambda run, plain: run["result"]["options"] == {"model.dropout": 0.5},
    ),
    Case(
        "model", ALL, "model=lambda: model(9)", said=("parameters are", "0.weight (6, 5)", "0.weight (9, 5)")
    ),
    Case("optimizer", ALL, "optimizer=groups", said=("optimizer", "SGD", "Adam")),
    *(
        Case("optimizer", family, "optimizer=lambda p: sgd(p, momentum=0.5)", acts=moved)
        for family in (ALL, "async()", "elastic(push_every=2)", "pipeline(stages=3)")
    ),
    Case(
        "optimizer",
        ALL,
        "optimizer=lambda p: groups(p, second=0.2)",
        acts=moved,
        base=(ALL, "optimizer=groups"),
    ),
    Case("data", ALL, f"data=toy.Memory({SAMPLES - 1})", said=("num_samples are 52", "51")),
    Case("data", "sync()", f"data=toy.Memory({SAMPLES}, window_samples=8)", said=("its data", "is")),
    Case(
        "validate", ALL, "validate=toy.Memory()", acts=lambda run, plain: "validation_loss" in run["result"]
    ),
    Case("test", ALL, "test=toy.Memory()", acts=lambda run, plain: bool(run["result"]["held_out"])),
    Case(
        "metrics",
        ALL,
        "validate=toy.Memory(), metrics=lambda m, b: {'one': 1.0}",
        acts=lambda run, plain: run["result"]["one"] == 1.0,
    ),
    Case("step", ALL, f"{TURNS}, step=toy.by_turns", base=(ALL, f"{TURNS}, step=by_turns_twice"), acts=moved),
    Case("optimizer", ALL, f"{TURNS}, step=toy.by_turns", said=("optimizer", "SGD", "several")),
    Case("predict", ALL, "predict=lambda m, b: m(b['x'])", acts=finished),
    Case("transform", ALL, "transform=toy.noisy", acts=moved),
    Case("transform", "async()", "transform=toy.noisy", acts=finished),
    Case("data", ALL, f"data=toy.dataset({SAMPLES})", said=("its data", "is")),
    Case("data", ALL, f"data=mt.Weighted(toy.dataset({SAMPLES}), [1] * {SAMPLES})", said=("its data", "is")),
    Case(
        "data",
        ALL,
        base=(ALL, f"data=toy.dataset({SAMPLES})"),
        changes=f"data=toy.dataset({SAMPLES})",
        acts=finished,
    ),
    Case("epochs", ALL, "epochs=3", acts=lambda run, plain: run["result"]["samples"] == 3 * SAMPLES),
    Case("epochs", "async()", "epochs=3", acts=lambda run, plain: run["result"]["samples"] == 3 * SAMPLES),
    *(
        Case(
            "batch_size", family, "batch_size=2", said=("batch_size was 4, this job's is 2", "--batch-size 4")
        )
        for family in [*LOCKSTEP, "sync()", "async()"]
    ),
    *(
        Case(
            "batch_size",
            family,
            "batch_size=2",
            at="end",
            acts=lambda run, plain: (
                run["result"]["steps"] > plain["result"]["steps"] and finished(run, plain)
            ),
        )
        for family in (ALL, "decentralized()", "sharded()")
    ),
    Case("strategy", "async()", base=("sync()",), acts=finished),
    Case("strategy", "sync()", base=("async(damping=gap_aware())",), acts=finished),
    Case(
        "strategy",
        "async(damping=gap_aware())",
        base=("async(damping=delay_compensated(0.04))",),
        acts=finished,
    ),
    Case("strategy", "ssp(bound=2,batching=by_speed())", base=("softsync(updates=2)",), acts=finished),
    Case("strategy", "async(push_wire=topk())", base=("async(reply_wire=eightbit())",), acts=finished),
    Case("strategy", "async(reply_wire=topk())", base=("async(reply_wire=eightbit())",), acts=finished),
    Case("strategy", "allreduce(codec=topk())", base=(ALL,), acts=finished),
    Case("strategy", "allreduce(codec=topk(density=0.5))", base=("allreduce(codec=topk())",), acts=finished),
    Case(
        "strategy",
        "allreduce(codec=powersgd(rank=1))",
        base=("allreduce(codec=powersgd(rank=2))",),
        acts=finished,
    ),
    Case("strategy", "allreduce(codec=topk())", base=("allreduce(codec=float16())",), acts=finished),
    Case(
        "strategy",
        "localsgd(period=3,outer=slowmo())",
        base=("localsgd(period=2,outer=diloco())",),
        acts=finished,
    ),
    Case(
        "strategy",
        "decentralized(topology='ring',codec=topk())",
        base=("decentralized(topology='ring')",),
        acts=finished,
    ),
    Case("strategy", "decentralized(codec=topk())", base=("decentralized()",), acts=finished),
    Case(
        "strategy",
        ALL,
        base=("allreduce(codec=topk())",),
        said=("codec=topk()", "codec=none()", "holds its residual"),
    ),
    Case(
        "strategy",
        "async()",
        base=("async(push_wire=topk())",),
        said=("push_wire=topk()", "push_wire=none()"),
    ),
    Case(
        "strategy",
        "decentralized()",
        base=("decentralized(codec=topk())",),
        said=("codec=topk()", "codec=none()"),
    ),
    Case("strategy", "sync()", base=(ALL,), said=("was written by allreduce()", "sync()")),
    Case(
        "strategy",
        "sync(optimizer='worker')",
        base=("sync()",),
        said=("was written by sync()", "optimizer='worker'"),
    ),
    Case("schedule", ALL, "schedule=mt.Decay(every=1, by=0.1)", acts=moved),
    Case("schedule", "async()", "schedule=mt.Decay(every=1, by=0.1)", acts=moved),
    Case("schedule", ALL, base=(ALL, "schedule=mt.Cosine(2)"), acts=moved),
    *(
        Case("scheduler", family, "scheduler=toy.SCHEDULERS['steps']", acts=moved)
        for family in (ALL, "async()", "sharded()", "decentralized()")
    ),
    Case("scheduler_metric", ALL, f"{BY_METRIC}, scheduler_metric='one'", base=(ALL, BY_METRIC), acts=moved),
    Case(
        "target",
        ALL,
        "validate=toy.Memory()",
        "target='validation_loss<1e-9'",
        acts=lambda run, plain: run["code"] == 3,
    ),
    *(
        Case("seed", family, options="seed=5", said=("seed is 0", "is 5"))
        for family in (ALL, "sync()", "decentralized()")
    ),
    Case(
        "on_nonfinite",
        ALL,
        "loss=poisoned, on_nonfinite='skip'",
        acts=lambda run, plain: run["result"]["nonfinite"] > 0 and run["code"] == 0,
    ),
    Case(
        "on_nonfinite",
        ALL,
        "loss=poisoned",
        base=(ALL, "on_nonfinite='skip'"),
        acts=lambda run, plain: run["code"] == 1,
    ),
    Case("drop_last", ALL, "drop_last=True", acts=lambda run, plain: run["result"]["samples_left_out"] == 8),
    Case(
        "checkpoint_every",
        ALL,
        "checkpoint_every='never'",
        acts=lambda run, plain: run["checkpoints"] == 0 < plain["checkpoints"],
    ),
    Case(
        "keep_checkpoints",
        ALL,
        "keep_checkpoints=1",
        acts=lambda run, plain: run["checkpoints"] == 1 < plain["checkpoints"],
    ),
    Case(
        "mtbf_s",
        ALL,
        "checkpoint_every='auto', mtbf_s=5.0",
        acts=lambda run, plain: read_policy("auto", 5.0) != read_policy("auto", 9.0),
    ),
    Case("synthetic", ALL, options="synthetic=True", said=("its data",)),
    Case(
        "fold",
        ALL,
        f"data=toy.dataset({SAMPLES})",
        "fold='2/4'",
        base=(ALL, f"data=toy.dataset({SAMPLES})"),
        said=("num_samples are 52", "39"),
    ),
    Case(
        "stages",
        "pipeline(stages=3)",
        "stages=lambda m, k: [m[:1], m[1:2], m[2:]]",
        said=("2.weight (6, 6), stage 1", "2.weight (6, 6), stage 2"),
    ),
    Case("tensor_plan", "tensor(parallel=3)", "tensor_plan={'0': 'gather'}", said=("column", "gather")),
    Case(
        "name",
        ALL,
        "name='other'",
        "run_dir=None",
        acts=lambda run, plain: "other" in run["result"]["run_dir"],
    ),
    *(
        Case("lr", family, "epochs=3", "lr=0.0", acts=lambda run, plain: run["code"] == 0)
        for family in FAMILIES
    ),
    *(Case("lr", family, options="lr=0.0", acts=moved) for family in FAMILIES),
    Case("lr", ALL, options="lr=0.0", base=(ALL, "schedule=mt.Decay(every=1, by=0.1)"), acts=moved),
    Case("steps", ALL, options="steps=4", acts=lambda run, plain: run["result"]["steps"] == 4),
    Case(
        "inject",
        ALL,
        options="inject=['stall(worker=1, chance=1.0, seconds=0.001)']",
        acts=lambda run, plain: any(row.get("slept_s") for row in run["result"]["injected"]),
    ),
    Case(
        "run_dir",
        ALL,
        options="run_dir=f'{root}/elsewhere'",
        acts=lambda run, plain: run["result"]["run_dir"].endswith("elsewhere"),
    ),
    *(
        Case(
            "init",
            family,
            options="init=f'{root}/start.safetensors'",
            said=("initial weights are", "start.s"),
        )
        for family in (ALL, "async()", "pipeline(stages=3)")
    ),
    *(Case("init", ALL, changes, acts=finished, base=(ALL, START)) for changes in (START, "")),
    Case("init_partial", ALL, f"{START}, init_partial=True", base=(ALL, START), said=("start", "partial")),
    Case("log", ALL, options="log='csv'", acts=lambda run, plain: "metrics.csv" in run["files"]),
    Case(
        "log_every",
        ALL,
        options="log_every=2",
        acts=lambda run, plain: len(steps_of(run)) > 0 == len(steps_of(plain)),
    ),
    Case(
        "trace",
        ALL,
        options="trace='steps=7:8'",
        acts=lambda run, plain: "trace-rank-0.json" in run["files"],
    ),
    Case(
        "callbacks",
        ALL,
        "callbacks=[Heard()]",
        "log_every=1",
        acts=lambda run, plain: run["heard"] == steps_of(run),
    ),
    Case("resume", ALL, at="end", acts=lambda run, plain: run["result"]["resumed_from"] == SAMPLES),
    Case("quiet", ALL, options="quiet=False", acts=lambda run, plain: len(run["out"]) > len(plain["out"])),
    Case(
        "watchdog_s",
        ALL,
        options="watchdog_s=77.0",
        acts=lambda run, plain: run["seen"][0]["watchdog_s"] == 77.0,
    ),
    Case(
        "checkpoint_pause",
        ALL,
        options="checkpoint_pause=True",
        acts=lambda run, plain: run["seen"][0]["pauses"] and not plain["seen"][0]["pauses"],
    ),
    Case(
        "go_back",
        ALL,
        options="go_back=True",
        acts=lambda run, plain: (
            run["result"]["went_back"]["times"] == 0 and "went_back" not in plain["result"]
        ),
    ),
    Case("compare_every", ALL, options="compare_every=1", acts=finished),
    Case("checksums", ALL, options="checksums=True", acts=finished),
    Case(
        "heartbeat_s",
        "sync()",
        options="heartbeat_s=55.0",
        acts=lambda run, plain: run["seen"][0]["floor_s"] == 55.0,
    ),
    Case(
        "find_unused_parameters",
        ALL,
        "find_unused_parameters=True",
        acts=lambda run, plain: run["seen"][0]["find_unused"] and not plain["seen"][0]["find_unused"],
    ),
    *(
        Case(
            "sparse_as_dense",
            family,
            "model=Looked, optimizer=plain_sgd, sparse_as_dense=True",
            base=(family, "model=Looked, optimizer=plain_sgd"),
            **found,
        )
        for family, found in (
            (ALL, {"acts": finished}),
            ("sync()", {"said": ("parameters are", "table.weight", "table table (17, 3)")}),
        )
    ),
    Case(
        "sync_batchnorm",
        ALL,
        "model=normed, drop_last=True, sync_batchnorm=True",
        base=(ALL, "model=normed, drop_last=True"),
        acts=lambda run, plain: run["code"] == 0 and run["model"] != plain["model"],
    ),
    *(Case("clip_norm", family, "clip_norm=0.01", acts=moved) for family in (ALL, "sync()", "sharded()")),
    Case("clip_norm", ALL, options="clip_norm=0.01", acts=moved),
    Case("clip_value", ALL, "clip_value=0.001", acts=moved),
    Case("clip_value", "sync()", options="clip_value=0.001", acts=moved),
    *(Case("gradient_noise", one, "gradient_noise=0.05", acts=moved) for one in (ALL, "sync()", "sharded()")),
    Case("gradient_noise", ALL, options="gradient_noise=0.05", acts=moved),
    *(
        Case(
            "accumulate",
            family,
            "accumulate=2",
            said=("batch_size was 4, this job's is 8 (each times accumulate)",),
        )
        for family in (ALL, "async()", "sharded()")
    ),
    Case("accumulate", ALL, "accumulate=2, batch_size=2", acts=finished),
    Case("accumulate", "sync()", "batch_size=2", "accumulate=2", acts=finished),
    *(
        Case(
            "validate_every",
            family,
            f"{MEASURED}, validate_every='30 samples'",
            acts=lambda run, plain: len(validations_of(run)) > 1,
        )
        for family in (ALL, "sync()", "sharded()")
    ),
    Case("keep_best", ALL, MEASURED, "keep_best='validation_loss'", acts=kept_best),
    Case("keep_best", "sync()", f"{MEASURED}, keep_best='>validation_loss'", acts=kept_best),
    *(
        Case(
            "patience",
            family,
            f"{MEASURED}, validate_every='13 samples', keep_best='>validation_loss'",
            "patience=1",
            acts=lambda run, plain: run["result"]["ended_early"],
        )
        for family in (ALL, "sync()", "decentralized()", "sharded()")
    ),
    Case("activation_checkpointing", ALL, "activation_checkpointing=True", acts=stayed),
    Case("device", ALL, "device='cpu'", acts=stayed),
    Case("compile", ALL, "compile='eager'", acts=finished),
    Case("precision", ALL, "precision='bfloat16'", acts=moved),
    Case("precision", "sync()", options="precision='bfloat16'", acts=moved),
    *(
        Case("ema", family, "ema=0.5", acts=lambda run, plain: "model-ema.safetensors" in run["files"])
        for family in (ALL, "sync()", "sync(servers=2)", "sharded()", "decentralized()", "localsgd(period=2)")
    ),
    Case("ema", "async(servers=2)", options="ema=0.5", base=("async(servers=1)", "ema=0.5"), acts=finished),
    Case(
        "validate_ema",
        ALL,
        f"{MEASURED}, ema=0.5, validate_ema=True",
        acts=lambda run, plain: "ema_validation_loss" in run["result"]["metrics"],
    ),  # fmt: skip
    Case("servers", "sync(servers=2)", base=("sync(servers=1)",), acts=finished),
    Case("workers", "async(servers=1)", base=("async(servers=2)",), acts=finished),
]
# of elastic workers the parameters move to one another at any rate
STILL_FAMILIES = [one for one in FAMILIES if one[:7] != "elastic"] if ALL_CELLS else [ALL, "async()"]


def row_of(case):
    """The pairs of runs at a rate of zero belong together."""
    still = case.options == "lr=0.0" and not case.base and case.strategy in STILL_FAMILIES
    return case.entry, bool(case.said), (case.strategy, case.changes) if still else ""


# `make tables` alone runs these.
LEFT_OUT = {
    "compile", "sync_batchnorm", "validate_ema", "patience", "clip_value", "gradient_noise", "metrics", "trace",
    "log_every", "name", "run_dir", "inject", "watchdog_s", "heartbeat_s", "checkpoint_pause", "sparse_as_dense",
    "go_back", "compare_every", "checksums",
}  # fmt: skip
RUN = cells([case for case in CASES if ALL_CELLS or case.entry not in LEFT_OUT], row_of)
NAMES = [f"{number} {case.entry} {case.strategy}" for number, case in enumerate(RUN)]
DRY_RUN = {"dry_run", "ranks", "nodes", "gpus_per_node", "server_nodes", "hosts", "write_hosts"}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    path = tmp_path_factory.mktemp("options")
    compared = [case for case in RUN if case.acts not in (None, finished)]
    plain = {f"plain {case.strategy} {case.at}": [case.strategy, "", "", case.at, []] for case in compared}
    walked = {
        name: [case.strategy, case.changes, case.options, case.at, list(case.base)]
        for name, case in zip(NAMES, RUN, strict=True)
    }
    cases = json.dumps(plain | walked)
    launch_program(3, "resumes_with_options", str(path), cases, cwd=path, timeout_s=600).check()
    return json.loads((path / "found.json").read_text())


def test_every_option_has_its_entry_and_every_entry_a_case():
    """A new field of `Job`, or a new option of `train`, says here what becomes of it when a run goes on with it."""
    fields = {field.name for kind in (Job, Overrides) for field in dataclasses.fields(kind)}
    assert ON_RESUME.keys() == fields | {"servers", "workers"}
    typed = vars(cli.parse(["train", "job.py"])).keys() - {
        "command",
        "config",
        "job",
        "run",
        "parse",
        "parser",
        "version",
    }
    world = {"threads"}  # which runs the workers: tests/threads/test_both_worlds.py
    assert typed - ON_RESUME.keys() == DRY_RUN | world
    page = (ROOT / "docs" / "fault-tolerance.md").read_text().partition("Going on with other options")[2]
    assert [entry for entry in ON_RESUME if entry not in page] == []
    ends = {entry: {bool(case.said) for case in CASES if case.entry == entry} for entry in ON_RESUME}
    for entry, kind in ON_RESUME.items():
        assert (kind == REFUSED) <= (True in ends[entry]), f"{entry}: no case that is refused"
        assert (kind in (ACTS, CONVERTED)) <= (False in ends[entry]), f"{entry}: no case that acts"


@pytest.mark.parametrize("name", NAMES)
def test_what_is_accepted_acts_and_what_cannot_is_refused_with_both_values(found, name):
    case, run = dict(zip(NAMES, RUN, strict=True))[name], found[name]
    if case.said:
        assert run["code"] == 2 and all(text in run["said"] for text in case.said), run
        return
    plain = found.get(f"plain {case.strategy} {case.at}")
    assert run.get("result") and run["result"]["resumed_from"], run
    assert case.acts(run, plain), run


@pytest.mark.parametrize("family", STILL_FAMILIES)
def test_at_a_rate_of_zero_two_epochs_more_or_none_are_the_same_model(found, family):
    """Nothing moves at all, whatever the optimizer remembers."""
    two, three = (
        found[name]
        for name, case in zip(NAMES, RUN, strict=True)
        if (case.strategy, case.options, case.base) == (family, "lr=0.0", ())
    )
    assert two["model"] == three["model"]
    assert two["result"]["samples"] != three["result"]["samples"]


def test_a_resume_tells_which_options_are_others(found):
    name = next(name for name in NAMES if name.endswith("epochs allreduce()"))
    (told,) = [row for row in found[name]["events"] if row.get("event") == "other options"]
    assert told["epochs"] == "2 -> 3" and "lr" not in told
