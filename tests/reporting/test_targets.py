"""What validation must reach: how a target is written, when it is met, and that every place judges alike."""

import dataclasses
import math

import pytest

from mpitrain import Async, Decentralized, LocalSGD, simulate
from mpitrain.errors import EXIT_OK, EXIT_TARGET_MISSED, UsageError
from mpitrain.job import Overrides, apply_overrides
from mpitrain.reporting.targets import check_targets, missed_targets, option_text, read_option, read_target
from tests import toy
from tests.training.test_session import judged


@pytest.mark.parametrize(
    ("goal", "met", "missed"),
    [
        (0.97, (0.97, 0.98, 5), (0.9699, -1.0)),
        (1, (1.0, 2.0), (0.5,)),
        (">0.5", (0.51,), (0.5, 0.4)),
        (">= 0.5", (0.5, 0.51), (0.4,)),
        ("<0.3", (0.29, -1.0), (0.3, 5.0)),
        (" <=3e-1", (0.3, 0.1), (0.31,)),
    ],
)
def test_a_target_is_at_least_a_number_or_below_or_above_one(goal, met, missed):
    target = read_target("score", goal)
    assert all(target.met(value) for value in met) and not any(target.met(value) for value in missed)
    for value in (math.nan, math.inf, -math.inf, None):
        assert not target.met(value) and "score" in target.why_missed(value)
    for value in missed:
        assert str(value) in target.why_missed(value)


@pytest.mark.parametrize("metric", ["validation_loss", "loss", "top5_error", "Perplexity"])
def test_a_number_for_what_should_be_small_is_refused_with_the_spelling(metric):
    with pytest.raises(UsageError, match=f'{{"{metric}": "<0.3"}}'):
        read_target(metric, 0.3)
    assert read_target(metric, "<0.3").met(0.2) and read_target(metric, ">0.3").met(5.0)


@pytest.mark.parametrize(
    "goal", ["0.97", "=0.97", "<", "<x", "<nan", ">inf", math.nan, None, True, (1,), "<1<2"]
)
def test_what_is_no_target_is_refused(goal):
    with pytest.raises(UsageError, match="target of 'accuracy'"):
        read_target("accuracy", goal)


def test_a_metric_that_is_not_reported_is_named_with_those_that_are():
    with pytest.raises(UsageError, match="'acuracy': .* reports accuracy, validation_loss"):
        check_targets({"acuracy": 0.9}, {"validation_loss": 1.0, "accuracy": 0.5})
    with pytest.raises(UsageError, match="reports no metric of that name; it reports validation_loss"):
        toy.make_job(validate=toy.Memory(), target={"accuracy": 0.9})  # known before anything has run
    assert missed_targets({"accuracy": 0.9}, {}).keys() == {"accuracy"}


def test_the_option_says_the_same_and_replaces_the_jobs():
    pairs = {"accuracy": 0.97, "validation_loss": "<0.3", "f1": ">0.5"}
    texts = [option_text(*pair) for pair in pairs.items()]
    assert texts == ["accuracy=0.97", "validation_loss<0.3", "f1>0.5"]
    assert dict(read_option(text) for text in texts) == pairs
    job = toy.make_job(validate=toy.Memory(), target={"validation_loss": "<1e9"})
    for given in (("validation_loss<0.3",), {"validation_loss": "<0.3"}, "validation_loss<0.3"):
        changed = Overrides(target=given)
        assert Overrides(**dataclasses.asdict(changed)) == changed  # as `simulate --replay` reads it back
        assert apply_overrides(job, changed).target == {"validation_loss": "<0.3"}
    for wrong in ("accuracy", "=3", "validation_loss=0.3", "accuracy=x", "accuracy:0.9"):
        with pytest.raises(UsageError, match="target"):
            apply_overrides(job, Overrides(target=(wrong,)))


@pytest.mark.parametrize(
    ("goal", "value", "code"),
    [("<0.3", 5.0, EXIT_TARGET_MISSED), ("<0.3", 0.2, EXIT_OK), ("<0.3", math.nan, EXIT_TARGET_MISSED)],
)
def test_a_run_is_judged_by_its_targets(goal, value, code):
    result = judged({"validation_loss": value}, target={"validation_loss": goal})
    assert result["exit_code"] == code
    assert result["target_missed"] == ({} if code == EXIT_OK else {"validation_loss": goal})


@pytest.mark.parametrize("strategy", [Async(), LocalSGD(period=2), Decentralized()], ids=str)
def test_a_simulation_judges_alike_and_hears_of_a_wrong_name_at_the_first_validation(strategy, tmp_path):
    job, options = toy.make_job(validate=toy.Memory(), epochs=2), {"quiet": True, "run_dir": str(tmp_path)}
    for goal, code in (("<1e-9", EXIT_TARGET_MISSED), ("<1e9", EXIT_OK)):
        result = simulate(job, strategy, workers=2, target={"validation_loss": goal}, **options)
        assert result["exit_code"] == code and (code == EXIT_OK) == (result["failure"] == "")
    measured = []

    def metrics(model, batch):
        measured.append(1)
        return {"accuracy": 0.5}

    wrong = dataclasses.replace(job, metrics=metrics, target={"acuracy": 0.2})
    with pytest.raises(UsageError, match="'acuracy': validation reports no metric"):
        simulate(wrong, strategy, workers=2, **options)
    assert len(measured) == 1
