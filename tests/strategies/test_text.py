"""Strategy text: parsed into values, never evaluated; both spellings round-trip."""

from __future__ import annotations

import dataclasses

import pytest

import mpitrain
from mpitrain import strategies
from mpitrain.errors import UsageError
from mpitrain.values import Value, names, parse, register, registered
from mpitrain.virtual import Constant, Link, ShiftedExponential


@register("test", "nested")
class Nested(Value):
    inner: Value = dataclasses.field(default=strategies.Keep(), metadata={"kind": "damping"})
    label: str = "a b"
    limit: int | None = None
    exact: bool = False
    rate: float = 0.5


@pytest.mark.parametrize(
    "value",
    [
        strategies.Async(), strategies.Async(servers=3), strategies.AllReduce(), Constant(2.0, 0.0), Link(1.0),
        ShiftedExponential(1, 2),
        Nested(label="async(x)", limit=4, exact=True), Nested(rate=2),
    ],
)  # fmt: skip
def test_both_spellings_round_trip(value):
    assert parse(str(value), value.kind) == value
    known = {
        **vars(strategies),
        "Constant": Constant,
        "Link": Link,
        "ShiftedExponential": ShiftedExponential,
        "Nested": Nested,
    }
    assert eval(repr(value), known) == value
    assert " " not in str(value).replace("'a b'", "")


def test_every_registered_strategy_damping_and_codec_round_trips_and_is_exported():
    for cls in registered("strategy") + registered("damping") + registered("codec"):
        value = cls()
        assert parse(str(value), cls.kind) == value
        assert getattr(mpitrain, cls.__name__) is cls


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("allreduce", strategies.AllReduce()),
        (" async ", strategies.Async()),
        ("async(2)", strategies.Async(servers=2)),
        ("async(servers=2, damping=keep())", strategies.Async(servers=2)),
        ("async( damping = keep )", strategies.Async()),
    ],
)
def test_accepted_spellings(text, value):
    assert parse(text, "strategy") == value


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("asinc(servers=1)", "did you mean 'async'"),
        ("async(server=1)", "did you mean 'servers'"),
        ("decentralized(topology=ring)", 'written in quotes: topology="ring"'),
        ("backup(1, stragglers=abort)", 'stragglers="abort"'),
        ("decentralized(topology=tensor)", 'topology="tensor"'),
        ("async(push_wire=full)", 'push_wire="full"'),
        ("softsync(blocking=true)", "write blocking=True"),
        ("async(servers=two)", "servers must be int"),
        ("async(servers=1, servers=2)", "given twice"),
        ("async(1, servers=2)", "given twice"),
        (
            "async(1, keep(), warmup(), 'full', 'full', 'server', 1, 0, 1, per_worker(), 'spread', 'none', 6)",
            "at most 12",
        ),
        ("async(servers=0)", "at least 1"),
        ("async(servers='2')", "must be int"),
        ("async(servers=True)", "must be int"),
        ("async(damping=3)", "must be a damping"),
        ("async(damping=allreduce())", "must be a damping"),
        ("keep()", "not a strategy"),
        ("3", "not a strategy"),
        ("", "cannot read"),
        ("async(", "cannot read"),
        ("async(**{})", "not allowed"),
        ("__import__('os').system('x')", "literals or registered"),
        ("async(servers=__import__('os').getpid())", "literals or registered"),
        ("async(servers=open('x'))", "unknown name 'open'"),
        ("async(servers=[].append)", "literals or registered"),
        ("(lambda: 1)()", "literals or registered"),
    ],
)
def test_wrong_text_is_answered_with_what_was_meant(text, said):
    with pytest.raises(UsageError) as caught:
        parse(text, "strategy")
    assert said in str(caught.value)


def test_nothing_is_evaluated(tmp_path):
    target = tmp_path / "touched"
    for text in (f"async(servers=open({str(target)!r}, 'w'))", f"open({str(target)!r}, 'w')"):
        with pytest.raises(UsageError):
            parse(text, "strategy")
    assert not target.exists()


@pytest.mark.parametrize(
    ("text", "kind", "there"),
    [
        ("asinc()", "strategy", "strategy"),
        ("async(damping=invers())", "strategy", "damping"),
        ("async(push_wire=treshold())", "strategy", "codec"),
        ("by_sped()", "batching", "batching"),
    ],
)
def test_an_unknown_name_lists_the_names_of_its_own_kind_only(text, kind, there):
    with pytest.raises(UsageError) as caught:
        parse(text, kind)
    assert str(caught.value).endswith(f"Known: {', '.join(names(there))}")


def test_the_list_of_strategies_is_in_the_answer():
    with pytest.raises(UsageError) as caught:
        parse("nothing_like_it()", "strategy")
    assert all(name in str(caught.value) for name in names("strategy"))


def test_a_value_made_in_python_is_checked_like_text():
    with pytest.raises(UsageError, match="at least 1"):
        strategies.Async(servers=0)
    with pytest.raises(UsageError, match="must be int"):
        strategies.Async(servers=1.5)
