"""What a trace file has to be, by the rules of chrome://tracing's JSON format, and what tests ask of its spans."""

from __future__ import annotations

import json


def read_trace(path):
    """The events of a file that keeps the rules."""
    content = json.loads(path.read_text())
    assert content.keys() >= {"traceEvents", "displayTimeUnit", "otherData"}
    events = content["traceEvents"]
    for event in events:
        assert isinstance(event["name"], str) and event["ph"] in ("X", "b", "e", "M")
        assert type(event["pid"]) is type(event["tid"]) is int
        assert isinstance(event["ts"], int | float) and event["ts"] == event["ts"]
        if event["ph"] == "X":
            assert event["dur"] >= 0 and isinstance(event["args"], dict)
        if event["ph"] in "be":
            assert event["cat"] and event["id"]
    assert len({event["pid"] for event in events}) == 1
    assert {event["name"] for event in events if event["ph"] == "M"} == {
        "process_name", "process_sort_index", "thread_name",
    }  # fmt: skip
    _check_flights(events)
    for thread in {event["tid"] for event in spans(events)}:
        _check_nesting([event for event in spans(events) if event["tid"] == thread])
    return events


def _check_flights(events):
    began = {(event["cat"], event["id"]): event for event in events if event["ph"] == "b"}
    ended = {(event["cat"], event["id"]): event for event in events if event["ph"] == "e"}
    assert began.keys() == ended.keys()
    assert len(began) == sum(event["ph"] == "b" for event in events), "an id begins twice"
    assert all(ended[key]["ts"] >= event["ts"] for key, event in began.items())


def _check_nesting(own):
    """Spans of a thread lie within one another or apart."""
    open_ends = []
    for event in sorted(own, key=lambda event: (event["ts"], -event["dur"])):
        end = event["ts"] + event["dur"]
        while open_ends and open_ends[-1] <= event["ts"] + 5e-3:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1] + 5e-3, f"{event} overlaps the span around it"
        open_ends.append(end)


def spans(events, name=None):
    """The spans of threads, or those of this name."""
    return [event for event in events if event["ph"] == "X" and name in (None, event["name"])]


def flights(events):
    """Names of what was under way beside the threads."""
    return {event["name"] for event in events if event["ph"] == "b"}


def steps_in(events):
    """Numbers of the steps, in order."""
    return [event["args"]["step"] for event in spans(events) if event["cat"] == "step"]


def covered(events):
    """The share of a step's time that the spans directly within it add up to, in the step in which that is largest: a
    rank that is left without a core between two spans has a gap there that is not the spans'."""
    shares = []
    for step in (event for event in spans(events) if event["cat"] == "step" and event["dur"]):
        end, total = step["ts"], 0.0
        within = (
            event
            for event in spans(events)
            if event is not step
            and event["tid"] == step["tid"]
            and step["ts"] - 5e-3 <= event["ts"]
            and event["ts"] + event["dur"] <= step["ts"] + step["dur"] + 5e-3
        )
        for event in sorted(within, key=lambda event: (event["ts"], -event["dur"])):
            if event["ts"] >= end - 5e-3:
                total, end = total + event["dur"], event["ts"] + event["dur"]
        shares.append(total / step["dur"])
    return max(shares)
