"""What is trained next: the rule of early stopping, and that every task is done once whatever dies."""

from __future__ import annotations

import os
import random
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.errors import UsageError
from mpitrain.reporting.targets import read_choice
from mpitrain.search.sweep.asha import Asha, promotable
from mpitrain.search.sweep.axes import Axis
from mpitrain.search.sweep.deal import (
    DONE,
    FAILED,
    INTERRUPTED,
    MAX_DEATHS,
    Answer,
    Compared,
    Ended,
    Records,
    Task,
    best_of,
    compare_settings,
    is_last_chance,
    meets_another,
    next_task,
    standings,
)
from mpitrain.search.sweep.journal import Dealer, Sweep
from mpitrain.search.sweep.plan import Plan

MORE, LESS = read_choice("accuracy"), read_choice("loss")


@pytest.mark.parametrize(
    ("rule", "epochs", "rungs"),
    [
        (Asha(1, 3), 27, (1, 3, 9, 27)),
        (Asha(2, 3), 20, (2, 6, 18, 20)),
        (Asha(1, 4), 4, (1, 4)),
        (Asha(1, 2), 3, (1, 2, 3)),
    ],
)
def test_rungs_grow_by_the_reduction_up_to_the_whole_training(
    rule: Asha, epochs: int, rungs: tuple[int, ...]
) -> None:
    assert rule.rungs(epochs) == rungs


def test_a_rule_that_could_stop_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="the first rung is 4 epochs, and a run has 4"):
        Asha(4).rungs(4)


def test_who_is_among_the_best_third_goes_on() -> None:
    """By hand: of 3 the best one, of 6 the best two. Less of a loss is better. One that has failed counts, and never
    goes on."""
    values = {0: 0.5, 1: 0.9, 2: 0.7}
    assert promotable([values, {}], [values, ()], MORE, 3) == (1, 1)
    assert promotable([values, {}], [values, ()], LESS, 3) == (0, 1)
    assert promotable([values, {}], [values, {1}], MORE, 3) is None
    six: dict[int, float | None] = {**values, 3: 0.8, 4: None, 5: float("nan")}
    assert promotable([six, {}], [six, {1}], MORE, 3) == (3, 1)
    assert promotable([{0: None, 1: None}, {}], [{0, 1}, ()], MORE, 2) is None
    # the higher rung first
    assert promotable([six, {1: 0.9, 3: 0.8}, {}], [six, {1, 3}, ()], MORE, 2) == (1, 2)


class Bench:
    """Dealers that work at once, in an order that a seed decides; a step ends, kills or interrupts a task."""

    def __init__(self, num: int, rungs: int, seed: int, reduction: int = 3, repeats: int = 1):
        self.num, self.rungs, self.reduction = num * repeats, rungs, reduction
        self.settings = [range(at * repeats, (at + 1) * repeats) for at in range(num)]
        self.random, self.trained = random.Random(seed), list[Task]()
        self.claimed: dict[Task, bool] = {}
        self.ended: dict[Task, Ended] = {}
        self.records = Records(self.claimed, self.ended)

    def next(self) -> Task | Answer:
        return next_task(self.records, self.num, self.rungs, MORE, self.reduction, self.settings)

    def compared(self) -> list[Compared]:
        return compare_settings(self.records, self.num, self.rungs, self.settings)

    def run(self, dealers: int, worth: list[float], deaths: int = 0, interruptions: int = 0) -> None:
        busy: list[Task] = []
        while True:
            answer = self.next()
            if isinstance(answer, Task) and len(busy) < dealers:
                assert answer not in self.claimed, "an attempt was dealt twice"
                self.claimed[answer] = True
                busy.append(answer)
                continue
            if not busy:
                assert answer is Answer.OVER
                return
            task = busy.pop(self.random.randrange(len(busy)))
            if deaths and self.random.random() < 0.5:
                deaths -= 1
                self.claimed[task] = False
            elif interruptions and self.random.random() < 0.5:
                interruptions -= 1
                self.ended[task] = Ended(INTERRUPTED)
            else:
                self.trained.append(task)
                self.ended[task] = Ended(DONE, worth[task.number])


@given(
    num=st.integers(1, 40),
    dealers=st.integers(1, 6),
    deaths=st.integers(0, 2),
    interruptions=st.integers(0, 5),
    seed=st.integers(0, 99),
)
def test_every_configuration_is_finished_once_whatever_dies(
    num: int, dealers: int, deaths: int, interruptions: int, seed: int
) -> None:
    bench = Bench(num, 1, seed)
    bench.run(dealers, [0.0] * num, deaths, interruptions)
    assert sorted(task.number for task in bench.trained) == list(range(num))
    assert {one.status for one in standings(bench.records, num, 1)} == {DONE}


@given(
    num=st.integers(3, 40),
    dealers=st.integers(1, 6),
    deaths=st.integers(0, 2),
    seed=st.integers(0, 99),
    reduction=st.integers(2, 4),
    repeats=st.integers(1, 3),
)
def test_early_stopping_finishes_with_the_best_and_trains_few_to_the_end(
    num: int, dealers: int, deaths: int, seed: int, reduction: int, repeats: int
) -> None:
    """The bound of the paper's synchronous version holds for what is left at the end, and the best is always among it:
    a setting whose mean is the best of all is the best of every set. All of its repetitions come to the same rung."""
    bench = Bench(num, 3, seed, reduction, repeats)
    worth = [bench.random.random() for _ in range(bench.num)]
    bench.run(dealers, worth, deaths)
    on = [[task.number for task in bench.trained if task.rung == rung] for rung in range(3)]
    assert sorted(on[0]) == list(range(bench.num))
    for lower, upper in zip(on, on[1:]):
        assert len(set(upper)) == len(upper) and set(upper) <= set(lower)
        assert len(upper) >= len(lower) // repeats // reduction * repeats
        assert all(len(set(upper) & set(those)) in (0, repeats) for those in bench.settings)
    found = best_of(bench.compared(), MORE)
    means = [statistics.fmean(worth[number] for number in those) for those in bench.settings]
    assert found is not None and found.numbers == tuple(bench.settings[means.index(max(means))])
    assert found.mean == pytest.approx(max(means))
    assert found.rung == max(rung for rung in range(3) if on[rung])


def test_a_setting_with_a_failed_repetition_is_never_the_best() -> None:
    """Its folds that have not failed may be the easy ones."""
    tasks = [Task(number) for number in range(4)]
    ended = dict(
        zip(tasks, [Ended(DONE, 0.9), Ended(FAILED), Ended(DONE, 0.2), Ended(DONE, 0.4)], strict=True)
    )
    found = compare_settings(Records(dict.fromkeys(tasks, True), ended), 4, 1, [(0, 1), (2, 3)])
    assert [one.mean for one in found] == [None, pytest.approx(0.3)]
    assert found[1].spread == pytest.approx(0.2 / 2**0.5)
    assert best_of(found, MORE) == found[1]


def test_settings_of_a_plan_differ_in_more_than_seed_and_fold() -> None:
    axes = (Axis("lr", ("1", "2")), Axis("fold", ("1/2", "2/2")))
    assert Plan("job.py", axes=axes, seeds=(0, 7)).settings == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert Plan("job.py", axes=axes[:1], folds=3).settings == ((0, 1, 2), (3, 4, 5))
    asked = Plan("job.py", axes=axes[:1], sampler="optuna", num=2, folds=2)
    assert asked.settings == ((0, 1), (2, 3))


def test_what_kills_its_process_again_and_again_is_given_up() -> None:
    attempts = [Task(0, 0, attempt) for attempt in range(MAX_DEATHS)]
    same = Records(
        dict.fromkeys(attempts, False), launches=dict.fromkeys(attempts, "a"), last=frozenset(attempts[-1:])
    )
    assert next_task(same, 1, 1, MORE, launch="a") is Answer.OVER  # its own last chance excuses nothing
    records = Records(dict.fromkeys([Task(0, 0, attempt) for attempt in range(MAX_DEATHS)], False))
    assert next_task(records, 1, 1, MORE) is Answer.OVER
    assert standings(records, 1, 1)[0].status == FAILED
    two = Records(dict.fromkeys([Task(0, 0, attempt) for attempt in range(MAX_DEATHS - 1)], False))
    assert next_task(two, 1, 1, MORE) == Task(0, 0, MAX_DEATHS - 1)


@pytest.mark.parametrize("seed", range(20))
def test_only_what_kills_its_launch_is_given_up(seed: int) -> None:
    """Four dealers in launches that one configuration ends each time, with all that runs beside it."""
    draw, num, launch = random.Random(seed), 9, 0
    culprit = draw.randrange(num)
    claimed, ended = dict[Task, bool](), dict[Task, Ended]()
    launches, last, busy = dict[Task, str](), set[Task](), list[Task]()
    while True:
        records = Records(claimed, ended, launches=launches, last=frozenset(last))
        answer = next_task(records, num, 1, MORE, launch=f"{launch}")
        if answer is Answer.OVER and not busy:
            break
        if isinstance(answer, Task) and len(busy) < 4:
            if is_last_chance(records, answer):
                assert not last & set(busy), "two last chances at once"
                last.add(answer)
            claimed[answer], launches[answer] = True, f"{launch}"
            busy.append(answer)
            continue
        task = busy.pop(draw.randrange(len(busy)))
        if task.number == culprit:
            claimed |= dict.fromkeys([task, *busy], False)
            busy, launch = [], launch + 1
        else:
            ended[task] = Ended(DONE, 1.0)
    assert launch == MAX_DEATHS
    assert [one.status == FAILED for one in standings(records, num, 1)] == [
        at == culprit for at in range(num)
    ]


def test_a_last_chance_that_meets_another_is_not_alone() -> None:
    launches, last = {Task(0): "a", Task(1): "a", Task(2): "b"}, frozenset([Task(0), Task(1), Task(2)])
    records = Records(dict.fromkeys(launches, True), {}, launches=launches, last=last)
    assert meets_another(records, Task(0)) and meets_another(records, Task(1))
    assert not meets_another(records, Task(2))


def test_what_has_failed_runs_again_only_when_asked() -> None:
    claimed, ended = {Task(0): True, Task(1): True}, {Task(0): Ended(FAILED), Task(1): Ended(DONE, 1.0)}
    assert next_task(Records(claimed, ended), 2, 1, MORE) is Answer.OVER
    assert next_task(Records(claimed, ended, frozenset([Task(0)])), 2, 1, MORE) == Task(0, 0, 1)


def test_a_free_dealer_waits_for_what_may_open_a_promotion_and_for_nothing_else() -> None:
    claimed = dict.fromkeys([Task(0), Task(1), Task(2)], True)
    ended = {Task(0): Ended(DONE, 1.0), Task(1): Ended(DONE, 0.5)}
    assert next_task(Records(claimed, ended), 3, 2, MORE, 3) is Answer.WAIT
    assert next_task(Records(claimed, ended), 3, 1, MORE) is Answer.OVER
    assert next_task(Records(claimed, ended, unsure=True), 3, 1, MORE) is Answer.WAIT


def test_a_claim_that_is_being_written_is_somebodys(tmp_path: Path) -> None:
    """The file is there before its text is: whoever looks in between must not take the task for abandoned."""
    sweep = Sweep(tmp_path / "sweep")
    sweep.begin(Plan("job.py"))
    with Dealer(sweep) as dealer:
        claim = sweep.claim_file(Task(0))
        claim.touch()
        assert sweep.records(dealer).claimed == {Task(0): True}
        os.utime(claim, (1, 1))  # its process has died meanwhile
        assert sweep.records(dealer).claimed == {Task(0): False}
        assert dealer.claim(Task(0, 0, 1)) and not dealer.claim(Task(0, 0, 1))
        dealer.ended(Task(0, 0, 1), Ended(DONE, 0.5, 8))
        journal = next(tmp_path.glob("sweep/dealers/*/journal.jsonl"))
        with open(journal, "a") as file:
            file.write('{"event": "ended", "number": 1, "rung"')  # torn by a crash
        assert sweep.records(dealer).ended == {Task(0, 0, 1): Ended(DONE, 0.5, 8)}
    assert sweep.records().claimed == {Task(0): False, Task(0, 0, 1): False}
