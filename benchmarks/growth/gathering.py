"""What does a push cost the server of `sync()`, and how many gradients wait at it, as the number of workers grows?

    python benchmarks/growth/gathering.py [--sizes 10 100 1024 10240] [--rounds 5]

The server's role is fed by hand: all workers push a payload of one number in a random order, again and again. Nothing
is sent, and an update is an addition, so the CPU seconds are those of the role. A payload for which the role has no
room (`Recv.upto`) stays with its worker until it has, as the worlds do it; `Announced` comes in its place, and its cost
is the push's. Rounds of all sizes take turns, and each has as many pushes.
"""

from __future__ import annotations

import heapq
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from measuring.common import make_parser, median_ratio, table, write_row
from measuring.measurement import TRAINING, Command, Measurement

from mpitrain.effects import Compute, Effect, Now, Recv, Send
from mpitrain.messages import Announced, Answer, Join, Lease, Message, Push
from mpitrain.reporting.report import NullReport
from mpitrain.roles import FaultTolerantServer
from mpitrain.strategies.parameter_server.sync import Sync

MEASUREMENT = Measurement(
    contestants=("the same server with 10 workers",),
    wanted="a push among 10,240 workers / among 10: 2; at most 256 gradients wait",
    depends=TRAINING,
    commands=(Command("python benchmarks/growth/gathering.py", minutes=2),),
)
LEAST_PUSHES = 40_960  # of a round


class Number:
    """A payload of one number."""

    num_bytes = 136  # with the stamps at both ends

    def statistics(self) -> dict[str, float]:
        return {}

    def release(self) -> None:
        pass


class Adds:
    """A store whose update is an addition."""

    def hear_options(self, text: str) -> None:
        pass

    def add(self, worker: int, payload: Any, weight: float, share: float = 1.0) -> None:
        pass

    def follow(self, samples: int, num_workers: int) -> None:
        pass

    def apply(self) -> None:
        pass

    def read(self, worker: int, full: bool = False, uses: int = 1) -> Number:
        return PAYLOAD


PAYLOAD = Number()


class Fed:
    """A server, and where its workers stand."""

    def __init__(self, num_workers: int, seed: int):
        self.workers, self.random = tuple(range(1, num_workers + 1)), random.Random(seed)
        self.server = FaultTolerantServer(Sync(), Adds(), self.workers, NullReport(), floor_s=float("inf"))
        self.role = self.server.run()
        self.versions = dict.fromkeys(self.workers, 0)
        self.at_senders: list[int] = []
        self.upto: int | None = None
        self._go_on(None)
        for worker in self.workers:
            self._go_on((worker, Join(0)))

    def push_all(self) -> None:
        """Each worker pushes once, in a random order."""
        order = list(self.workers)
        self.random.shuffle(order)
        for worker in order:
            if self.upto is not None and worker > self.upto:
                heapq.heappush(self.at_senders, worker)
                self._go_on((worker, Announced()))
            else:
                self._push(worker)
            while self.at_senders and (self.upto is None or self.at_senders[0] <= self.upto):
                self._push(heapq.heappop(self.at_senders))

    def _push(self, worker: int) -> None:
        version = self.versions[worker]
        self._go_on((worker, Push(version, version, 1, PAYLOAD, lease=Lease(version, worker - 1, 1))))

    def _go_on(self, answer: tuple[int, Message] | None) -> None:
        """Hand the role what it waits for, and carry out what it wants until it waits again."""
        reply: Any = answer
        while True:
            effect: Effect = self.role.send(reply)
            reply = None
            if isinstance(effect, Recv):
                self.upto = effect.upto
                return
            if isinstance(effect, Send):
                if isinstance(effect.message, Answer):
                    self.versions[effect.to] = effect.message.version
            elif isinstance(effect, Compute):
                effect.task()
            else:
                assert isinstance(effect, Now), effect
                reply = 0.0


def main() -> None:
    parser = make_parser(__doc__, MEASUREMENT)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10, 100, 1024, 10_240], help="workers")
    parser.add_argument("--rounds", type=int, default=5, help="of all sizes, taking turns")
    parser.add_argument("--pushes", type=int, default=LEAST_PUSHES, help="of a round, at least")
    options = parser.parse_args()
    fed = {size: Fed(size, seed=size) for size in options.sizes}
    took_s: dict[int, list[float]] = {size: [] for size in options.sizes}
    for _ in range(options.rounds):
        for size, one in fed.items():
            updates = max(1, options.pushes // size)
            began_s = time.process_time()
            for _ in range(updates):
                one.push_all()
            took_s[size].append((time.process_time() - began_s) / (updates * size))
    first, rows = options.sizes[0], []
    for size, one in fed.items():
        ratio = median_ratio(took_s[size], took_s[first])
        rows.append({
            "workers": size, "push_us": 1e6 * statistics.median(took_s[size]), "ratio": ratio,
            "waiting": one.server.summary()["max_pending"],
        })  # fmt: skip
    print(
        table(
            [("workers", "CPU us a push", f"among {first}", "gradients waiting at most"), *map(line_of, rows)]
        )
    )
    write_row("gathering", {"rounds": options.rounds, "sizes": rows})


def line_of(row: dict[str, Any]) -> tuple[str, ...]:
    """Of the table."""
    return f"{row['workers']:,}", f"{row['push_us']:.1f}", f"{row['ratio'][0]:.2f}", str(row["waiting"])


if __name__ == "__main__":
    main()
