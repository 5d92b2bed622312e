"""What a sweep varies: reading it, and drawing from laws."""

from __future__ import annotations

import math
import statistics

import pytest

from mpitrain.errors import UsageError
from mpitrain.search.sweep.axes import Axis, read_axis
from mpitrain.search.sweep.plan import Plan, words_of


@pytest.mark.parametrize(
    ("text", "name", "values"),
    [
        ("lr=0.001,0.01", "lr", ("0.001", "0.01")),
        ("batch-size=16", "batch_size", ("16",)),
        (
            "strategy=allreduce(),async(servers=2, damping=power(0.5))",
            "strategy",
            ("allreduce()", "async(servers=2, damping=power(0.5))"),
        ),
        ("model.sizes=[[64, 64], [128]]", "model.sizes", ("[64, 64]", "[128]")),
        ("model.batch-norm=true,false", "model.batch-norm", ("true", "false")),
        ('target="a,b",c', "target", ('"a,b"', "c")),
    ],
)
def test_values_are_split_at_commas_outside_brackets_and_quotes(
    text: str, name: str, values: tuple[str, ...]
) -> None:
    assert read_axis(text) == Axis(name, values)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lr", "NAME=VALUE"),
        ("lr=", "NAME=VALUE"),
        ("lr=1,,2", "nothing between two commas"),
        ("lr=1,2,1", "stands there twice"),
        ("lr=log_unifrom(1e-4, 1)", "did you mean 'log_uniform'?"),
        ("lr=log_uniform(0, 1)", "greater than 0"),
        ("lr=uniform(2, 1)", "low must be below high"),
        ("lr=uniform(lw=2, high=1)", "did you mean 'low'?"),
        ("lr=[1, 2", "no list in JSON"),
    ],
)
def test_what_cannot_be_read_is_answered_with_the_way_out(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said.replace("?", r"\?")):
        read_axis(text)


def test_draws_follow_their_law() -> None:
    """The logarithm of log_uniform(1e-4, 1) has mean -2 and standard deviation 4 / sqrt(12)."""
    axis = read_axis("lr=log_uniform(1e-4, 1)")
    found = [math.log10(float(axis.draw(0, index))) for index in range(2000)]
    assert statistics.fmean(found) == pytest.approx(-2, abs=4 * 4 / math.sqrt(12 * 2000))
    assert statistics.stdev(found) == pytest.approx(4 / math.sqrt(12), rel=0.05)
    whole = read_axis("model.hidden=integers(1, 3)")
    counts = [sum(whole.draw(0, index) == text for index in range(3000)) for text in ("1", "2", "3")]
    assert sum(counts) == 3000 and all(abs(count - 1000) < 4 * math.sqrt(3000 * 2 / 9) for count in counts)


def test_the_ends_of_a_law_belong_to_it() -> None:
    law = read_axis("model.hidden=integers(2, 64, log=True)").distribution
    assert law is not None and (law.draw(0.0), law.draw(1 - 1e-12)) == ("2", "64")


def test_a_draw_does_not_depend_on_the_other_axes() -> None:
    lr = read_axis("lr=log_uniform(1e-4, 1)")
    alone = Plan("j.py", axes=(lr,), sampler="random", num=5).configurations()
    among = Plan("j.py", axes=(read_axis("epochs=1,2"), lr), sampler="random", num=5).configurations()
    assert [dict(one.options)["lr"] for one in among] == [dict(one.options)["lr"] for one in alone]
    other = Plan("j.py", axes=(lr,), sampler="random", num=5, sampler_seed=1).configurations()
    assert len({one.options for one in (*alone, *other)}) == 10


def test_a_grid_holds_every_combination_with_every_seed_and_fold_once() -> None:
    plan = Plan("j.py", axes=(read_axis("lr=1,2,3"), read_axis("model.a=x,y")), seeds=(0, 7), folds=2)
    plan.check()
    found = plan.configurations()
    assert plan.num_configurations == len(found) == len({one.options for one in found}) == 3 * 2 * 2 * 2
    assert [one.number for one in found] == list(range(24))
    assert found[1].words == ["--lr=1", "--set=model.a=x", "--seed=0", "--fold=2/2"]


def test_a_flag_is_a_bare_word_or_none() -> None:
    assert words_of("init_partial", "true") == ["--init-partial"] and words_of("init_partial", "false") == []
    assert words_of("model.norm", "true") == ["--set=model.norm=true"]
