"""What has arrived for an update of a server is added in the order of ranks, as soon as that is known."""

from hypothesis import given
from hypothesis import strategies as st

from mpitrain.roles.server.gathering import Gathering

MOST = 12


class Store:
    """Keeps the order in which it is handed gradients."""

    def __init__(self):
        self.added = []

    def hear_options(self, text):
        pass

    def add(self, worker, payload, weight, share):
        self.added.append(payload)


class Counted(set):
    """How often somebody goes through all of it."""

    passes = 0

    def __iter__(self):
        self.passes += 1
        return super().__iter__()

    def __sub__(self, other):
        self.passes += 1
        return super().__sub__(other)


def in_turn(events):
    """The gradients that can be added after these, by the definition, one update long."""
    added, pending, due, gone, without = [], {}, set(), set(), set()
    for what, worker, number in events:
        if what == "due":
            due |= {worker}
        elif what == "gone":
            gone |= {worker}
        elif what == "nothing":
            without |= {worker}
        else:
            pending[worker, number] = (worker, number)
        while pending:
            first = min(pending)
            arrived = {worker for worker, _ in added} | without
            if any(other < first[0] for other in due - gone - arrived):
                break
            added.append(pending.pop(first))
    return added


@given(
    st.sets(st.integers(0, MOST - 1)),
    st.lists(
        st.tuples(
            st.sampled_from(["push", "push", "push", "nothing", "gone", "due"]), st.integers(0, MOST - 1)
        ),
        max_size=4 * MOST,
    ),
)
def test_a_gradient_is_added_when_nobody_before_it_is_missing(due, moves):
    store, now, version = Store(), set(due), 0
    gathering = Gathering(store)
    events = [("due", worker, 0) for worker in due]
    for number, (what, worker) in enumerate(moves):
        if what == "due" and any(event[:2] == ("gone", worker) for event in events):
            continue  # nobody comes back
        events.append((what, worker, number))
        if what == "push":
            gathering.take_gradient(worker, number, (worker, number), 1.0)
        elif what == "nothing":
            gathering.pass_over(worker)
        else:
            (now.add if what == "due" else now.discard)(worker)
            version += 1
        gathering.add_in_turn(now, version)
        assert store.added == in_turn(events), events
    left = sorted({(worker, number) for what, worker, number in events if what == "push"} - set(store.added))
    before = list(store.added)
    gathering.add_all()
    assert store.added == before + left and gathering.num_taken == len(store.added)
    gathering.clear()
    assert gathering.empty


def test_a_gradient_costs_no_look_at_all_workers():
    """They are gone through once for each set of workers, not at every push; two updates long."""
    store, due = Store(), Counted(range(1000))
    gathering = Gathering(store)
    for _ in range(2):
        for worker in reversed(range(1000)):
            gathering.take_gradient(worker, 0, worker, 1.0)
            gathering.add_in_turn(due, 0)
        assert store.added == list(range(1000)) and due.passes == 1
        gathering.clear()
        store.added.clear()
