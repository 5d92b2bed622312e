"""The recorder by itself: which steps it keeps, and what it makes of spans."""

import threading
import time

import pytest

from mpitrain.errors import UsageError
from mpitrain.system import trace
from mpitrain.system.trace import Trace, TraceSteps, read_steps
from tests.trace_files import flights, read_trace, spans, steps_in


@pytest.fixture(autouse=True)
def no_trace():
    yield
    trace.activate(None)
    trace.switch(False)


def start(tmp_path, **options):
    made = Trace(TraceSteps(2, 4), tmp_path / "trace-rank-0.json", 0, "rank 0 (worker)", **options)
    trace.activate(made)
    return made


@pytest.mark.parametrize(
    ("text", "steps"), [("steps=50:60", (50, 60)), (" steps = 0:1 ", (0, 1)), (None, None)]
)
def test_steps_are_named_as_a_slice(text, steps):
    assert read_steps(text) == steps


@pytest.mark.parametrize(
    "text", ["50:60", "steps=60:50", "steps=5:5", "steps=5", "steps=-1:5", "steps=a:b", "", "steps=1:2:3", 7]
)
def test_anything_else_is_refused_with_an_example(text):
    with pytest.raises(UsageError, match="steps="):
        read_steps(text)


def test_only_these_steps_are_recorded_and_the_file_is_there_when_they_are_over(tmp_path):
    made = start(tmp_path)
    for step in range(6):
        trace.begin_step(step)
        with trace.span("outer", trace.COMPUTE, samples=3), trace.span("inner", trace.READ):
            pass
        assert made.path.exists() == (step >= 4)
    events = read_trace(made.path)
    assert steps_in(events) == [2, 3] and len(spans(events)) == 2 * 3
    assert spans(events, "outer")[0]["args"] == {"samples": 3}


def test_of_two_spans_of_one_length_the_outer_one_comes_first(tmp_path):
    now = [0.0]
    made = start(tmp_path, clock=lambda: now[0])
    trace.begin_step(2)
    with trace.span("outer", trace.COMPUTE), trace.span("inner", trace.READ):
        now[0] += 1.0
    trace.finish()
    assert [event["name"] for event in spans(read_trace(made.path))] == ["step 2", "outer", "inner"]


def test_a_run_that_ends_within_the_steps_leaves_what_there_is(tmp_path):
    start(tmp_path)
    trace.begin_step(3)
    trace.flight("under way")
    assert trace.finish() == 1 and trace.finish() is None
    events = read_trace(tmp_path / "trace-rank-0.json")
    assert steps_in(events) == [3] and flights(events) == {"under way"}


def test_a_run_that_never_comes_to_the_steps_leaves_no_file(tmp_path):
    start(tmp_path)
    trace.begin_step(0)
    assert trace.finish() == 0 and not list(tmp_path.iterdir())


def test_every_thread_has_a_row_of_its_own(tmp_path):
    made = start(tmp_path)
    trace.begin_step(2)
    with trace.span("here", trace.WAIT):
        thread = threading.Thread(
            target=trace.spanned("there", trace.READ)(time.sleep), args=(0.01,), name="reader"
        )
        thread.start()
        thread.join()
    trace.finish()
    events = read_trace(made.path)
    assert spans(events, "here")[0]["tid"] != spans(events, "there")[0]["tid"]
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {"main", "reader"}


def test_a_server_records_from_the_first_push_of_the_steps_until_all_workers_are_past_them(tmp_path):
    made = start(tmp_path)
    for worker, step, recording in (
        (1, 0, False), (2, 0, False), (1, 1, False), (1, 2, True), (1, 4, True), (2, 2, True), (2, 4, False),
    ):  # fmt: skip
        trace.hear_push(worker, step)
        assert made.recording == recording
        with trace.span("apply", trace.SERVER):
            pass
    assert len(spans(read_trace(made.path), "apply")) == 3


def test_nobody_waits_for_a_worker_that_is_gone(tmp_path):
    made = start(tmp_path, batches_per_push=2)
    trace.hear_push(1, 0)
    trace.hear_push(2, 1)
    assert made.recording
    trace.forget(1)
    trace.hear_push(2, 2)
    assert not made.recording


def test_a_disk_that_is_full_costs_the_trace_only(tmp_path, capsys):
    start(tmp_path / "not there")
    trace.begin_step(2)
    trace.finish()
    assert "cannot be written" in capsys.readouterr().err


def test_a_trace_has_a_largest_size(tmp_path, monkeypatch):
    monkeypatch.setattr(trace, "MOST_EVENTS", 2)
    made = start(tmp_path)
    trace.begin_step(2)
    for _ in range(5):
        with trace.span("one", trace.WAIT):
            pass
    assert (len(made.events), made.num_dropped) == (2, 3)


def test_without_a_trace_objects_stay_as_they_are():
    """So that no step of theirs asks whether it is to be recorded."""

    class Thing:
        step = 0

        def work(self):
            return 1

    plain, function = Thing(), Thing.work
    trace.watch(plain, work=("work", trace.COMPUTE))
    assert not vars(plain) and trace.watched(function, "work", trace.COMPUTE) is function
    trace.switch(True)
    traced = Thing()
    trace.watch(traced, work=("work", trace.COMPUTE))
    assert vars(traced) and traced.work() == 1


def test_a_run_without_a_trace_has_the_plain_world_and_steps(monkeypatch, tmp_path):
    import mpitrain as mt
    from mpitrain.model.replicas.worker_replica import Replica
    from tests import toy

    made = []
    monkeypatch.setattr(Replica, "__init__", _noting(made, Replica.__init__))
    for text, count in ((None, 0), ("steps=0:1", 1)):
        job = toy.make_job(trace=text)
        mt.simulate(job, mt.Async(), workers=1, quiet=True, run_dir=str(tmp_path / str(text)))
        assert (
            sum("fetch" in vars(one.reader) and hasattr(one.reader.fetch, "__wrapped__") for one in made)
            == count
        )
        made.clear()


def _noting(made, init):
    def note(self, *arguments, **options):
        init(self, *arguments, **options)
        made.append(self)

    return note


def test_where_nothing_is_recorded_all_spans_are_one_that_holds_nothing():
    one, other = trace.span("forward", trace.COMPUTE), trace.span("backward", trace.COMPUTE, step=1)
    assert one is other and type(one).__slots__ == ()
