"""`log="mllog"`: MLPerf's lines, by what mlperf-logging's own checker says of them."""

import io
import json
from functools import partial

import pytest
import torch

import mpitrain as mt
from mpitrain.errors import UsageError
from mpitrain.reporting.report import Report, Reported
from mpitrain.training.mllog_facts import mllog_facts
from mpitrain.values import parse
from tests import toy
from tests.ranks import find_mpi, run_ranks

START = {
    "job": "digits", "strategy": "sync()", "workers": 4, "batch_size": 32, "accumulate": 2, "samples": 100,
}  # fmt: skip
FACTS = {"seed": 7, "eval_samples": 20, "opt_name": "adam", "metric": "accuracy"}


def lines_of(path):
    text = (path / "mllog.txt").read_text().splitlines()
    assert all(line.startswith(":::MLLOG ") for line in text)
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in text]


def short(path):
    """Keys with their epoch, or value."""
    found = []
    for line in lines_of(path):
        if line["event_type"] != "POINT_IN_TIME" or line["key"] == "eval_accuracy":
            epoch = line["metadata"].get("epoch_num", "")
            found.append(f"{line['key']} {epoch if line['value'] is None else line['value']}".strip())
    return found


def facts(path):
    return {line["key"]: line["value"] for line in lines_of(path)}


def begin(path, **options):
    one = Report(
        Reported(path, 300, stream=io.StringIO(), logs=["mllog"], log_every=1, facts=FACTS, **options)
    )
    one.event("start", **START)
    return one


def epoch(one, number, accuracy, steps=2):
    for step in range(1, steps + 1):
        done = 100 * (number - 1) + 100 * step // steps
        one.progress(done, 10 * number + step, number, 0.5)
    one.event("validation", epoch=number, samples=done, validation_loss=0.1, accuracy=accuracy)


def end(one, samples, status="ok", **more):
    one.event("end", status=status, samples=samples, **more, model="m")
    one.close()


WHOLE = [
    "init_start", "init_stop", "run_start", "epoch_start 1", "epoch_stop 1", "eval_start 1", "eval_accuracy 0.5",
    "eval_stop 1", "epoch_start 2", "epoch_stop 2", "eval_start 2", "eval_accuracy 0.75", "eval_stop 2", "run_stop",
]  # fmt: skip


def test_intervals_are_in_order_and_facts_are_those_of_the_run(tmp_path):
    one = begin(tmp_path)
    epoch(one, 1, 0.5)
    one.progress(150, 30, 2, 0.5)
    one.progress(200, 31, 2, 0.5)
    end(one, 200, accuracy=0.75, validation_loss=0.1)
    assert short(tmp_path) == WHOLE
    found = facts(tmp_path)
    assert found["global_batch_size"] == 4 * 32 * 2 and found["gradient_accumulation_steps"] == 2
    assert (found["train_samples"], found["eval_samples"], found["seed"]) == (100, 20, 7)
    assert found["opt_name"] == "adam" and "metric" not in found
    assert (found["submission_org"], found["submission_benchmark"]) == ("none", "digits")
    times = [line["time_ms"] for line in lines_of(tmp_path)]
    assert times == sorted(times) and isinstance(times[0], int) and times[0] > 1.7e12
    assert lines_of(tmp_path)[-1]["metadata"] == {"status": "success", "samples_count": 200}


def test_short_epochs_have_their_lines_though_no_row_of_progress_falls_into_them(tmp_path):
    one = begin(tmp_path)
    one.event("validation", epoch=1, samples=100, accuracy=0.5)
    end(one, 200, accuracy=0.75)
    assert short(tmp_path) == WHOLE


def test_a_validation_in_the_middle_of_an_epoch_does_not_end_it(tmp_path):
    one = begin(tmp_path)
    one.event("validation", epoch=1, samples=50, accuracy=0.25)
    one.event("validation", epoch=1, samples=100, accuracy=0.5)
    end(one, 100, "missed", accuracy=0.5)
    found = short(tmp_path)
    assert [word for word in found if word.startswith("epoch")] == ["epoch_start 1", "epoch_stop 1"]
    assert found.index("epoch_stop 1") > found.index("eval_accuracy 0.25")
    assert lines_of(tmp_path)[-1]["metadata"]["status"] == "aborted"


def test_a_run_that_goes_on_has_one_start_one_end_and_nothing_twice(tmp_path):
    one = begin(tmp_path)
    epoch(one, 1, 0.5)
    epoch(one, 2, 0.6)
    end(one, 200, "requeue")
    one = begin(tmp_path, resumed_at=100)
    epoch(one, 2, 0.75)
    end(one, 200)
    assert short(tmp_path) == WHOLE
    begin(tmp_path).close()
    assert short(tmp_path) == WHOLE[:3]


def test_submissions_say_who_and_what(tmp_path, monkeypatch):
    for name in ("ORG", "PLATFORM", "DIVISION", "STATUS", "BENCHMARK"):
        monkeypatch.setenv(f"MLPERF_SUBMISSION_{name}", f"my {name}")
    begin(tmp_path).close()
    found = facts(tmp_path)
    assert {found[f"submission_{name.lower()}"] for name in ("ORG", "BENCHMARK")} == {
        "my ORG",
        "my BENCHMARK",
    }


def test_the_optimizer_is_asked_for_its_rate():
    job = toy.make_job(
        log="mllog", optimizer=partial(torch.optim.AdamW, lr=0.25), validate=toy.Memory(), target={"a": 1},
        metrics=lambda model, batch: {"a": 1.0},
    )  # fmt: skip
    found = mllog_facts(job, None, None)
    wanted = {"seed": job.seed, "metric": "a", "opt_name": "adamw", "opt_base_learning_rate": 0.25}
    assert found.items() >= wanted.items()
    assert mllog_facts(job, 0.5, None)["opt_base_learning_rate"] == 0.5

    def of_the_model(named_parameters):
        return torch.optim.SGD([dict(named_parameters)["0.bias"]], lr=0.1)

    found = mllog_facts(toy.make_job(log="mllog", optimizer=of_the_model), None, None)
    assert found["seed"] == job.seed and not found.keys() & {"opt_name", "opt_base_learning_rate"}
    assert mllog_facts(toy.make_job(log="csv"), None, None) == {}


DISCLOSED = {
    "allreduce()": ("fp32", 1, 1, 16), "sync(push_wire='bfloat16',reply_wire='float16')": ("fp16", 1, 1, 16),
    "localsgd(wire='int8')": ("int8", 1, 1, 16), "allreduce(codec=topk(density=0.1))": (None, 1, 1, 16),
    "pipeline(stages=2,microbatches=4)": ("bfloat16", 1, 2, 4), "tensor(parallel=2)": ("bfloat16", 2, 1, 16),
}  # fmt: skip


@pytest.mark.parametrize(("strategy", "expected"), DISCLOSED.items(), ids=DISCLOSED)
def test_settings_that_the_rules_ask_for_are_those_of_the_strategy(strategy, expected):
    job = toy.make_job(log="mllog", strategy=parse(strategy, "strategy"), precision="bfloat16", batch_size=16)
    found = mllog_facts(job, None, None)
    assert found["lowest_numerical_precision_in_linear"] == "bfloat16" and "config_filename" not in found
    names = (
        "lowest_numerical_precision_in_comm",
        "tensor_parallelism",
        "pipeline_parallelism",
        "micro_batch_size",
    )
    assert tuple(found.get(name) for name in names) == expected


def test_a_simulation_has_no_such_times():
    with pytest.raises(UsageError, match="a simulation has none"):
        mt.simulate(toy.make_job(log="mllog"), mt.Async(), workers=2, quiet=True)


JOB = """
from tests import toy
job = toy.make_job(validate=toy.Memory(), epochs=2, metrics=lambda model, batch: {"accuracy": 0.5})
"""


def test_mlperfs_own_checker_takes_the_log_of_a_run(tmp_path):
    """The rules of the open division name MLPerf's benchmarks, so the job has to bear the name of one."""
    checker = pytest.importorskip("mlperf_logging.compliance_checker.mlp_compliance")
    (tmp_path / "job.py").write_text(JOB)
    words = [
        "-m",
        "mpitrain",
        "train",
        "job.py",
        "--strategy",
        "sync()",
        "--quiet",
        "--log",
        "mllog",
        "--run-dir",
        "run",
    ]
    env = {"MLPERF_SUBMISSION_BENCHMARK": "llama31_8b"}
    run_ranks(2, [str(find_mpi()[0]), *words], cwd=tmp_path, env=env).check()
    for rules in ("5.1.0", "6.1.0"):
        found = checker.make_checker("training", rules, False, True)
        valid = found.check_file(str(tmp_path / "run" / "mllog.txt"), f"training_{rules}/common.yaml")
        assert valid, (rules, found.overwritable, found.not_overwritable)
    assert len([key for key in short(tmp_path / "run") if key.startswith("eval_accuracy")]) == 2
    assert facts(tmp_path / "run")["config_filename"] == "job.py"
