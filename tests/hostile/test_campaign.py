"""The fixed cases, a few damages of every kind of file, and that the campaign notices what it looks for."""

from __future__ import annotations

import pytest

from tests.hostile import cases
from tests.hostile.campaign import BOUND_MIB, fingerprint, judge, run
from tests.sampling import sampled

SHARES = 3  # neighbours among the fixed cases are alike; `make hostile` runs them all, too


@pytest.mark.parametrize("share", sampled(range(SHARES), [0]))
def test_hostile_inputs_end_in_a_message_and_nothing_else(tmp_path, share):
    outside = cases.make_outside(tmp_path)
    before = fingerprint(outside)
    chosen = [*cases.fixed(tmp_path, outside), *cases.damaged(tmp_path, range(1))][share::SHARES]
    outcomes = run(chosen, outside)
    wrong = {
        outcome["name"]: (judge(outcome), outcome["said"][-1500:]) for outcome in outcomes if judge(outcome)
    }
    assert wrong == {}
    assert [outcome["name"] for outcome in outcomes] == [case.name for case in chosen]
    assert fingerprint(outside) == before


def test_the_campaign_notices_what_it_looks_for(tmp_path):
    """A file outside that is read, a traceback, a process that dies (and those after it still run), and each alone."""
    outside = cases.make_outside(tmp_path)
    acts = {"read": [str(outside / "secret.h5")], "nothing": [], "abort": [], "checkpoint": [str(tmp_path)]}
    found = run([cases.Case(act, act, words) for act, words in acts.items()], outside)
    assert found[0]["code"] == 0 and "secret.h5" in judge(found[0])[0]
    assert judge(found[1]) == ["ended with 99", "a traceback"]
    assert judge(found[2]) == ["ended with -6"]
    assert found[3]["code"] == 0 and judge(found[3]) == []
    good = found[3]
    assert (
        judge({**good, "mib": BOUND_MIB + 1})
        and judge({**good, "said": "\x1b[2J"})
        and judge({**good, "code": -11})
    )


def test_a_change_outside_changes_the_fingerprint(tmp_path):
    outside = cases.make_outside(tmp_path)
    before = fingerprint(outside)
    (outside / "new").touch()
    after = fingerprint(outside)
    (outside / "new").write_text("x")
    assert len({before, after, fingerprint(outside)}) == 3
