"""Traces of runs over MPI, one of each kind of run: what a rank's file holds, and that it accounts for its steps."""

import json

import pytest

from tests.mpi.cases import launch_program
from tests.trace_files import covered, flights, read_trace, spans, steps_in

STRATEGIES = {
    "allreduce": ("allreduce()", {}),
    "topk": ("allreduce(codec=topk())", {}),
    "cast": ("allreduce(codec=float16())", {}),
    "accumulated": ("allreduce()", {"accumulate": 2, "epochs": 4}),
    "localsgd": ("localsgd(period=2)", {}),
    "async": ("async(push_wire=topk())", {}),
    "overlapping": ("async(inflight=2)", {}),
    "peers": ("decentralized()", {}),
    "sharded": ("sharded()", {}),
    "tensor": ("tensor(parallel=2)", {"tensor_plan": {"0": "column", "2": "row"}}),
    "pipeline": ("pipeline(microbatches=2)", {}),
}
RUNS = STRATEGIES | {"too late": ("allreduce()", {"trace": "steps=900:901"})}


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    path = tmp_path_factory.mktemp("traces")
    result = launch_program(2, "trace_runs", str(path), json.dumps(RUNS), cwd=path, timeout_s=300).check()
    return path, result.stdout


def events_of(launched, name, rank):
    return read_trace(launched[0] / name / f"trace-rank-{rank}.json")


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_spans_of_a_worker_add_up_to_its_steps(launched, name):
    """To 5 percent; there is one worker under servers."""
    for rank in (1,) if name in ("async", "overlapping") else (0, 1):
        events = events_of(launched, name, rank)
        assert steps_in(events) == [2, 3, 4, 5, 6, 7]
        assert covered(events) > 0.95
        names = {event["name"] for event in spans(events)}
        assert {"forward", "backward"} <= names
        assert name in ("async", "overlapping") or "optimizer" in names
        assert flights(events)


def test_a_server_shows_what_it_waits_for_and_applies(launched):
    events = events_of(launched, "async", 0)
    names = {event["name"] for event in spans(events)}
    assert {"handle Push from 1", "apply", "decode", "wait for a message", "send"} <= names
    assert {"Push from 1", "Reply to 1"} <= flights(events)
    kinds = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert len(kinds) == 1 and kinds[0].startswith("rank 0 (server on ")


@pytest.mark.parametrize(
    ("name", "span"),
    [
        ("allreduce", "wait for the mean gradient"),
        ("topk", "encode"),
        ("topk", "decode"),
        ("cast", "cast"),
        ("async", "encode"),
        ("pipeline", "microbatches"),
        ("localsgd", "all-reduce"),
        ("allreduce", "read"),
    ],
)
def test_what_a_strategy_does_has_its_span(launched, name, span):
    assert spans(events_of(launched, name, 1), span)


def test_collectives_overlap_with_the_backward_pass(launched):
    """Those of gradients; between steps the ranks also ask one another, every half second, whether a run is to end."""
    events = events_of(launched, "allreduce", 0)
    assert "allreduce" in flights(events)
    begun = [event for event in events if event["ph"] == "b" and event["name"] == "allreduce"]
    collectives = [event for event in begun if event["args"]["what"].startswith("float32")]
    passes = spans(events, "backward")
    assert len(collectives) >= len(passes) > 0
    assert all(
        any(one["ts"] <= event["ts"] <= one["ts"] + one["dur"] for one in passes) for event in collectives
    )
    assert all(
        any(one["ts"] <= event["ts"] <= one["ts"] + one["dur"] for event in collectives) for one in passes
    )


def test_gradients_beside_the_messages_are_on_a_thread_of_their_own(launched):
    events = events_of(launched, "overlapping", 1)
    assert {one["tid"] for one in spans(events, "forward")} != {
        one["tid"] for one in spans(events, "gradient")
    }
    assert "mpitrain-compute_0" in {
        event["args"]["name"] for event in events if event["name"] == "thread_name"
    }


def test_all_ranks_have_one_clock(launched):
    """A collective ends for all within the time that it takes; the ranks of this test are on one node."""
    first, second = (events_of(launched, "allreduce", rank) for rank in (0, 1))
    for number in range(2, 6):
        one, other = (
            next(event for event in spans(events) if event["args"].get("step") == number)
            for events in (first, second)
        )
        assert abs(one["ts"] - other["ts"]) < 0.5 * (one["dur"] + other["dur"])
    offsets = [json.loads(line)["offset"] for line in launched[1].splitlines() if '"offset"' in line]
    assert sorted(rank for rank, _, _ in offsets) == [0, 1]
    assert all(abs(offset_s) <= uncertainty_s for _, offset_s, uncertainty_s in offsets)


def test_steps_that_are_never_taken_leave_a_warning(launched):
    assert not list((launched[0] / "too late").glob("trace-*"))
    assert "steps=900:901" in (launched[0] / "too late" / "metrics.jsonl").read_text()
