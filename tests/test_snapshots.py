"""Snapshots: a comparison names the line of a help, and of a refusal the strategy, the question and both answers."""

import pytest

from mpitrain.values import parse
from tests.snapshots import ASKED, NUM_DIGITS, asked, differences, refusal_files, texts

A, B = "a" * NUM_DIGITS, "b" * NUM_DIGITS
SETS = {A: ("async()", "asked", {"sparse": "not: 'so'"}), B: ("sync()", "asked", {})}


def snapshot(text="one\ntwo\n", **answers):
    rows = {"async()": [f"asked={A}"], "sync()": [f"asked={B}"], "ssp()": [f"asked={B}"]} | answers
    return {"helps/one.txt": text.encode(), **refusal_files(rows, SETS)}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, []),
        ({"text": "one\n2\n"}, ["helps/one.txt:2: was 'two', is '2'"]),
        ({"text": "one\ntwo\nthree\n"}, ["helps/one.txt:3: was None, is 'three'"]),
        (
            {"sync()": [f"asked={A}"], "ssp()": [f"asked={A}"]},
            ["ssp() and 1 more: asked: sparse: was not refused, is \"not: 'so'\""],
        ),
        ({"async()": [f"asked={B}"]}, ["async(): asked: sparse: was \"not: 'so'\", is not refused"]),
    ],
)
def test_what_differs_is_named(changed, said):
    assert list(differences(snapshot(), snapshot(**changed))) == said


def test_every_question_is_asked_of_every_family():
    for text in texts(0):
        assert all(isinstance(asked(feature, parse(text, "strategy")), str) for feature in ASKED), text
