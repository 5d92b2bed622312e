"""Where does the time of a push and its reply go, part by part?

    mpitrain launch -n 2 benchmarks/push_parts.py [--megabytes 0.0655] [--rounds 20]

One worker pushes to one server without computing, as in `server.py`. Functions that a push passes through are watched.
Its way leads through the worker until the push's payload is MPI's, then through the server until the reply's payload
is MPI's, then through the worker again until the new parameters are in place. Each moment of the way belongs to the
innermost watched function of the rank that it leads through, or to the polls where there is none, so the parts add up
to the whole. Blocks that nobody watches take turns with these: they say what watching costs.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from measuring.common import machine, make_parser, median_ratio, table, write_row
from measuring.measurement import TRAINING, Command, Measurement
from server import DRIVER, Ours, runtime, serve_ours, timed

from mpitrain.model import ShardStore
from mpitrain.model.optimizers.step_hooks import ServerStep
from mpitrain.model.replicas.worker_replica import Replica
from mpitrain.mpi import messenger
from mpitrain.mpi.messenger import PAYLOAD_TAG, Messenger
from mpitrain.mpi.world import MpiWorld

MEASUREMENT = Measurement(
    contestants=("the same pushes without anybody watching",),
    depends=TRAINING,
    keys=("megabytes",),
    figures=("unwatched_us", "watched_to_unwatched"),
    commands=(Command("mpitrain launch -n 2 benchmarks/push_parts.py", minutes=1),),
)

SERVER = 1
PUSHES = 50  # of a block
POLLS = "polls, MPI, and what is watched by nobody"
# What is watched: where it is, its name, and the part that it is.
WATCHED = (
    (messenger, "encode", "encode the header"),
    (messenger, "decode", "decode the header"),
    (Messenger, "_isend", "post a send"),
    (Messenger, "_listen_to_any", "listen again"),
    (Messenger, "_listen", "listen again"),
    (Messenger, "_receive_into", "take a buffer and post its receive"),
    (Messenger, "_checked", "look at the stamps and make the message"),
    (ShardStore, "add", "gather the gradient"),
    (ShardStore, "apply", "around the optimizer's step"),
    (ServerStep, "__call__", "the optimizer's step"),
    (ShardStore, "read", "read the parameters"),
    (Replica, "load", "take the parameters in"),
)
ROLE = "the role"

Timeline = list[tuple[float, str]]


class Watch:
    """What this rank does from which moment on, and when a payload had been handed to MPI."""

    def __init__(self) -> None:
        self.timeline: Timeline = []
        self.left_s: list[float] = []
        self._inside = [POLLS]

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._inside.append(name)
        self.timeline.append((time.monotonic(), name))
        try:
            yield
        finally:
            self._inside.pop()
            self.timeline.append((time.monotonic(), self._inside[-1]))

    def around(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def watched(*arguments: Any, **options: Any) -> Any:
            with self.part(name):
                return function(*arguments, **options)

        return watched

    def isend(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Of a payload, the moment when it is MPI's, too."""

        def watched(own: Messenger, buffer: Any, rank: int, tag: int, *more: Any) -> Any:
            with self.part("post a send"):
                op = function(own, buffer, rank, tag, *more)
            if tag == PAYLOAD_TAG:
                self.left_s.append(time.monotonic())
            return op

        return watched

    def advance(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The role's own code between two effects."""

        def watched(own: MpiWorld, role: Any, answer: Any) -> Any:
            return function(own, WatchedRole(role, self), answer)

        return watched


class WatchedRole:
    """A role whose code between two effects is watched."""

    def __init__(self, role: Any, watch: Watch):
        self._role, self._watch = role, watch

    def send(self, answer: Any) -> Any:
        with self._watch.part(ROLE):
            return self._role.send(answer)


@contextlib.contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Everything of `WATCHED` is watched in this process meanwhile."""
    with contextlib.ExitStack() as stack:

        def put(owner: Any, name: str, function: Callable[..., Any]) -> None:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, function)

        for owner, name, part in WATCHED:
            function = getattr(owner, name)
            put(owner, name, watch.isend(function) if name == "_isend" else watch.around(function, part))
        put(MpiWorld, "advance", watch.advance(MpiWorld.advance))
        yield


def parts_between(timeline: Timeline, begin_s: float, end_s: float, who: str) -> dict[str, float]:
    """Seconds of each part of a rank in a stretch of time."""
    seconds: dict[str, float] = defaultdict(float)
    clipped = [(begin_s, POLLS), *timeline, (end_s, POLLS)]
    for (from_s, part), (to_s, _) in pairwise(clipped):
        from_s, to_s = max(from_s, begin_s), min(to_s, end_s)
        if to_s > from_s:
            seconds[f"{who}: {part}" if part != POLLS else part] += to_s - from_s
    return seconds


def way_of(steps: list[tuple[float, float]], watches: list[dict[str, Any]]) -> list[dict[str, float]]:
    """The seconds of each part of every push, from its beginning to its end."""
    found = []
    for begin_s, end_s in steps:
        inside = [[at for at in watch["left_s"] if begin_s <= at <= end_s] for watch in watches]
        if [len(each) for each in inside] != [1, 1]:
            raise SystemExit(f"a push and its reply sent {inside} payloads, and not one each")
        (sent_s,), (answered_s,) = inside
        stretches = (
            (DRIVER, begin_s, sent_s, "worker"), (SERVER, sent_s, answered_s, "server"),
            (DRIVER, answered_s, end_s, "worker"),
        )  # fmt: skip
        push: dict[str, float] = defaultdict(float)
        for rank, from_s, to_s, who in stretches:
            lines = [one for one in watches[rank]["timeline"] if begin_s <= one[0] <= end_s]
            for part, seconds in parts_between(lines, from_s, to_s, who).items():
                push[part] += seconds
        found.append(dict(push))
    return found


def block(numel: int, watch: Watch | None) -> list[tuple[float, float]]:
    """Beginning and end of each push; rank 1 serves them."""
    steps = []
    with watching(watch) if watch else contextlib.nullcontext():
        if runtime.rank == SERVER:
            serve_ours(numel, 1, 0, (DRIVER,))
            return []
        ours = Ours(numel, (SERVER,))
        timed(ours.step, 5, 0)
        for _ in range(PUSHES):
            begin_s = time.monotonic()
            ours.step()
            steps.append((begin_s, time.monotonic()))
        ours.leave()
    return steps


def measure(numel: int, num_rounds: int) -> tuple[list[dict[str, float]], list[float], list[float]]:
    """The pushes that were watched, and medians of the blocks that were and that were not."""
    found, watched_s, unwatched_s = list[dict[str, float]](), list[float](), list[float]()
    for number in range(num_rounds + 1):
        for watch in (Watch(), None):
            steps = block(numel, watch)
            middle = statistics.median(end - begin for begin, end in steps) if steps else 0.0
            if number:  # the first is warm-up
                (watched_s if watch else unwatched_s).append(middle)
            if watch:
                told = runtime.allgather({"timeline": watch.timeline, "left_s": watch.left_s})
                if runtime.rank == DRIVER and number:
                    found += way_of(steps, told)
    return found, watched_s, unwatched_s


def show(
    megabytes: float, found: list[dict[str, float]], watched_s: list[float], unwatched_s: list[float]
) -> None:
    """Prints the table and writes the row. Means add up; a push that took three times the median was interrupted."""
    most_s = 3 * statistics.median(sum(push.values()) for push in found)
    counted = [push for push in found if sum(push.values()) <= most_s]
    names = {name for push in counted for name in push}
    parts = {name: statistics.mean(push.get(name, 0.0) for push in counted) * 1e6 for name in names}
    parts = dict(sorted(parts.items(), key=lambda item: -item[1]))
    total_us = statistics.mean(sum(push.values()) for push in counted) * 1e6
    cost = median_ratio(watched_s, unwatched_s)
    print(f"{machine()['cpu']}, {megabytes:g} MB: {len(counted)} of {len(found)} pushes count")
    lines = [("part", "us", "share")]
    lines += [(name, f"{value:.1f}", f"{value / total_us:.1%}") for name, value in parts.items()]
    print(table([*lines, ("sum", f"{sum(parts.values()):.1f}", ""), ("measured", f"{total_us:.1f}", "")]))
    print(f"unwatched {statistics.median(unwatched_s) * 1e6:.1f} us; watched / unwatched {cost[0]:.2f}")
    row = {
        "megabytes": megabytes, "rounds": len(watched_s), "pushes": len(found), "counted": len(counted),
        "parts_us": parts, "total_us": total_us, "unwatched_us": statistics.median(unwatched_s) * 1e6,
        "watched_to_unwatched": cost,
    }  # fmt: skip
    write_row("push_parts", row)


def main() -> None:
    parser = make_parser(__doc__, MEASUREMENT)
    parser.add_argument("--megabytes", type=float, default=0.0655)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(int(options.megabytes * 1e6 / 4), options.rounds)
    if runtime.rank == DRIVER:
        show(options.megabytes, *found)
    runtime.finish()


if __name__ == "__main__":
    main()
