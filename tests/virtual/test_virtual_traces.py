"""Traces of virtual runs: the file of every rank, on the world's clock."""

import json
import sys

import pytest

import mpitrain as mt
from mpitrain.errors import UsageError
from mpitrain.system import trace
from mpitrain.values import parse
from tests import toy
from tests.trace_files import covered, flights, read_trace, spans, steps_in

STRATEGIES = (
    "async(servers=2)", "sync(push_wire=topk())", "ssp(bound=3)", "backup(spare=1)", "sync(push_every=2)",
    'sync(optimizer="worker")', "localsgd(period=2)", "allreduce()", "decentralized()",
    'decentralized(topology="ring")',
)  # fmt: skip


def simulate(tmp_path, text="async()", workers=3, jitter=0.2, rate=1e-5, **fields):
    job = toy.make_job(validate=toy.Memory(), **{"trace": "steps=1:3"} | fields)
    return mt.simulate(
        job, parse(text, "strategy"), workers=workers, run_dir=str(tmp_path), quiet=True,
        compute=parse(f"constant(1, jitter={jitter})", "compute"), network=parse(f"link(gbit_per_s={rate})", "network"),
    )  # fmt: skip


@pytest.mark.parametrize("text", STRATEGIES)
def test_every_rank_leaves_a_file_whose_spans_add_up_to_its_steps(text, tmp_path):
    result = simulate(tmp_path, text)
    files = sorted(tmp_path.glob("trace-rank-*.json"))
    assert len(files) == result["workers"] + result["servers"]
    for number, path in enumerate(files):
        events = read_trace(path)
        assert {event["pid"] for event in events} == {number}
        assert flights(events)
        if number < result["servers"]:
            assert spans(events, "apply") and spans(events, "wait for a message")
            continue
        assert steps_in(events) == [1, 2]
        assert covered(events) > 0.95
        assert {"gradient", "forward", "backward", "read"} <= {event["name"] for event in spans(events)}


def test_times_are_those_of_the_law(tmp_path):
    simulate(tmp_path, "sync()", workers=2)
    events = read_trace(tmp_path / "trace-rank-1.json")
    for one in spans(events, "gradient"):
        assert 0.8e6 <= one["dur"] <= 1.2e6
    waits = spans(events, "wait for a message")
    pushes = [event for event in events if event["ph"] == "b" and event["name"] == "Push to 0"]
    assert len(waits) == len(pushes) == 2
    assert all(wait["ts"] == push["ts"] for wait, push in zip(waits, pushes, strict=True))


def test_a_gradient_that_is_broken_off_ends_there(tmp_path):
    simulate(tmp_path, 'backup(spare=1, stragglers="abort")', jitter=0.9, rate=1)
    broken_off = 0
    for path in sorted(tmp_path.glob("trace-rank-*.json"))[1:]:
        events = read_trace(path)
        pushes = {round(event["ts"]) for event in events if event["name"].startswith("Push")}
        broken_off += sum(round(one["ts"] + one["dur"]) not in pushes for one in spans(events, "gradient"))
    assert broken_off


def test_steps_that_the_run_does_not_take_leave_a_warning_and_no_file(tmp_path):
    assert simulate(tmp_path, trace="steps=900:901")["status"] == "ok"
    assert not list(tmp_path.glob("trace-rank-*.json"))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert ["steps=900:901" in row["text"] for row in rows if row["event"] == "warning"][-1]


def test_a_job_refuses_what_names_no_steps():
    with pytest.raises(UsageError, match="END must be greater"):
        toy.make_job(trace="steps=3:3")
    with pytest.raises(UsageError, match="steps=FIRST:END"):
        mt.simulate(toy.make_job(), parse("async()", "strategy"), trace="3", quiet=True)


@pytest.mark.parametrize("text", ["async()", "localsgd(period=2)", "decentralized()"])
def test_without_a_trace_a_step_hardly_asks_for_it(text, tmp_path):
    """Calls into the recorder: so many a step, whatever a call takes."""

    def count(steps):
        calls = []

        def look(frame, event, _):
            if event == "call" and frame.f_code.co_filename == trace.__file__:
                calls.append(frame.f_code.co_name)

        sys.setprofile(look)
        try:
            simulate(tmp_path / str(steps), text, workers=1, trace=None, data=toy.Memory(6 * steps), epochs=1)
        finally:
            sys.setprofile(None)
        return len(calls)

    assert count(20) - count(10) <= 2 * 10
