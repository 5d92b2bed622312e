"""What a run's wall time went to: the parts add up to it whatever happens, and samples are useful or redone."""

import json
import random

import pytest

from mpitrain.system.time_spent import FILE, TimeSpent, goodput, read_spent


class Clock:
    """Seconds that the test lets pass; the calendar's begin elsewhere."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s

    def calendar(self):
        return 1e9 + self.now_s


def start(folder, clock, attempt, first, age_s=0.0):
    return TimeSpent(folder, attempt, first, age_s, clock, clock.calendar)


@pytest.mark.parametrize("seed", range(20))
def test_the_parts_add_up_to_the_wall_time_and_all_samples_are_useful_or_redone(tmp_path, seed):
    """Starts that are killed anywhere, go on from any checkpoint, pause, wait and go back within themselves."""
    draw, clock, samples, processed = random.Random(seed), Clock(), 0, 0
    clock.now_s = 2.0
    for attempt in range(6):
        samples = draw.choice([samples, samples // 2, 0])
        spent = start(tmp_path, clock, f"start{attempt}", samples, age_s=2.0 if attempt == 0 else 0.5)
        clock.now_s += draw.random()
        spent.begin()
        for _ in range(draw.randrange(40)):
            clock.now_s += draw.choice([0.1, 0.1, 0.1, 7.0])
            pause_s = draw.choice([0.0, 0.05])
            spent.pause(draw.choice(["checkpoint", "validation"]), pause_s)
            processed, samples = processed + 8, samples + 8
            spent.progress(samples)
            if draw.random() < 0.05:
                clock.now_s += draw.choice([0.0, 1.0])
                samples = draw.choice([samples, samples // 2])
                spent.begin(samples)
            if draw.random() < 0.2:
                spent.mark()
        spent.write()  # a kill comes here
        ended_s = clock.now_s
        clock.now_s += 3.0 + draw.random()
    found = goodput(read_spent(tmp_path))
    assert found["wall_s"] == pytest.approx(ended_s, abs=1e-3) == sum(found["seconds"].values())
    assert all(one >= 0 for one in found["seconds"].values())
    assert found["samples_useful"] == samples and found["samples_processed"] == processed
    assert found["samples_useful"] + found["samples_redone"] == found["samples_processed"]
    assert found["samples_per_second"] == pytest.approx(samples / ended_s, rel=1e-5)


def test_each_second_goes_where_it_belongs(tmp_path):
    """20 steps of 1 s; a checkpoint after 12 of them, a validation of 2 s, a step that waited for 30 s; killed, started
    again 4 s later from the checkpoint after 1.5 s of Python and 0.5 s of setting up, and 8 more steps."""
    clock = Clock()
    clock.now_s = 3.0
    spent = start(tmp_path, clock, "one", 0, age_s=3.0)
    clock.now_s += 1.0
    spent.begin()
    for step in range(1, 21):
        clock.now_s += 31.0 if step == 15 else 1.0
        spent.progress(8 * step)
        if step == 12:
            spent.mark()
            clock.now_s += 0.25
            spent.pause("checkpoint", 0.25)
        if step == 16:
            clock.now_s += 2.0
            spent.pause("validation", 2.0)
    spent.write()
    clock.now_s += 4.0 + 1.5
    again = start(tmp_path, clock, "two", 8 * 12, age_s=1.5)
    clock.now_s += 0.5
    again.begin()
    for step in range(13, 21):
        clock.now_s += 1.0
        again.progress(8 * step)
    clock.now_s += 5.0
    again.end()
    again.close()
    found = goodput(read_spent(tmp_path))
    wanted = {
        "useful": 20.0, "redone": 8.0, "starting": 3.0 + 1.0 + 1.5, "restart": 4.0 + 0.5, "checkpoint": 0.25,
        "validation": 2.0, "waiting": 30.0, "ending": 5.0,
    }  # fmt: skip
    assert found["seconds"] == pytest.approx(wanted, abs=1e-4)
    assert (found["samples_useful"], found["samples_redone"]) == (160, 64)


def test_time_passes_while_nothing_is_reported_and_torn_lines_cost_nothing_else(tmp_path):
    clock = Clock()
    spent = start(tmp_path, clock, "one", 0)
    spent.begin()
    for step in range(1, 5):
        clock.now_s += 1.0
        spent.progress(step)
    clock.now_s += 100.0  # it hangs, and a thread goes on writing
    spent.write()
    with (tmp_path / FILE).open("a") as file:
        file.write('{"mark": 4, "train')
    again = start(tmp_path, clock, "two", 4)
    again.begin()
    found = goodput(read_spent(tmp_path))
    assert found["seconds"]["waiting"] == pytest.approx(99.0) and found["seconds"]["useful"] == pytest.approx(
        5.0
    )
    assert [one.attempt for one in read_spent(tmp_path)] == ["one", "two"]
    assert all(len(line) < 600 for line in (tmp_path / FILE).read_text().splitlines())
    assert goodput([]) == {} and json.dumps(found)


@pytest.mark.parametrize(("goes_on_from", "counted_s"), [(8, 0.0), (4, 1000.0)])
def test_the_time_behind_an_end_on_request_is_the_runs_where_something_is_lost(
    tmp_path, goes_on_from, counted_s
):
    clock = Clock()
    for attempt, samples in (("one", 0), ("two", goes_on_from)):
        spent = start(tmp_path, clock, attempt, samples)
        spent.begin()
        while samples < (8 if attempt == "one" else 16):
            clock.now_s += 1.0
            spent.progress(samples := samples + 1)
        clock.now_s += 2.0
        spent.end()
        clock.now_s += 1.0
        spent.close()
        ended_s, clock.now_s = clock.now_s, clock.now_s + 1000.0
    found = goodput(read_spent(tmp_path))
    assert found["seconds"]["restart"] == counted_s and found["wall_s"] == ended_s - 1000.0 + counted_s
    assert (found["samples_useful"], found["samples_redone"]) == (16, 8 - goes_on_from)


def test_another_rank_takes_over_where_the_first_was_heard_of_last(tmp_path):
    """Two of its 6 steps are done again; what is between the two is waiting, not a restart."""
    clock = Clock()
    spent = start(tmp_path, clock, "one", 0)
    spent.begin()
    for step in range(1, 7):
        clock.now_s += 1.0
        spent.progress(step)
    spent.write()
    clock.now_s += 3.0
    after = start(tmp_path, clock, "one", None)
    clock.now_s += 1.0
    after.begin(4)
    for step in range(5, 9):
        clock.now_s += 1.0
        after.progress(step)
    after.close()
    found = goodput(read_spent(tmp_path))
    assert (found["samples_useful"], found["samples_redone"]) == (8, 2)
    assert (found["seconds"]["waiting"], found["seconds"]["restart"]) == (4.0, 0.0)
    assert found["wall_s"] == clock.now_s
