"""What a run has written of its rows, read back; event files by TensorBoard's own reader."""

import csv
import json
import warnings

import pytest


def rows_of(path):
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def table(path):
    with (path / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def points(path, tag):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        events = accumulator.EventAccumulator(str(path / "tensorboard"))
        events.Reload()
    return [(point.step, point.value) for point in events.Scalars(tag)] if tag else events.Tags()["scalars"]
