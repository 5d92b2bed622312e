"""One rank of a run whose ranks are threads of this process.

Invariants: what ranks hand one another at a meeting are JSON values, copied as over MPI, so no rank changes what
another one holds. There is one node, and a rank that fails ends all of them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

from mpitrain.errors import InjectedError
from mpitrain.system import awake, processes
from mpitrain.system.draws import LOCK
from mpitrain.system.launched.ranks import Ranks
from mpitrain.threads.draws import Draws
from mpitrain.threads.hub import CalledOffError, Hub
from mpitrain.threads.sums import Sums, WorkersSum
from mpitrain.threads.world import ThreadWorld

TURN_S = 0.2  # between two looks whether another rank has failed


class ThreadRanks(Ranks):
    """This thread among the others.

    Args:
        hub: of the run; rank: this one's; host: its name.
        plan: what a run over MPI decides its all-reduces by, which a checkpoint keeps.
        draws: of all replicas.
    """

    def __init__(self, hub: Hub, rank: int, host: str, plan: Any, draws: Draws):
        super().__init__(rank, hub.size)
        self.hub, self.allreduce_plan, self.draws = hub, plan, draws
        self.hosts, self.processes = [host] * hub.size, [processes.identity()] * hub.size
        self.local_rank = rank
        self._all = hub.meeting(range(hub.size), 0)
        self._num_groups: dict[tuple[int, ...], int] = {}
        self._is_waiting = False

    # ---- what this rank is at

    @property
    def arriving(self) -> bool:
        return self._is_waiting

    def stuck_s(self) -> float:
        """Seconds since the last progress or wait for others."""
        return 0.0 if self._is_waiting else super().stuck_s()

    def wait(self, waits: bool) -> None:
        """This rank begins, or ends, to wait for others."""
        self._is_waiting = waits
        self.stamp_waiting()

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        self.wait(True)
        try:
            yield
        finally:
            self.wait(False)

    # ---- collectives

    def meet(self, brought: object = None, make: Callable[[list[Any]], Any] = list) -> Any:
        """Answered, when every rank has come, with what `make` gives for all that was brought."""
        with self._waiting():
            return self._all.meet(self.rank, brought, make)

    def barrier(self) -> None:
        self.meet()

    def allgather(self, value: object) -> list[Any]:
        return [json.loads(text) for text in self.meet(json.dumps(value))]

    def broadcast(self, value: object, root: int = 0) -> Any:
        text = self.meet(json.dumps(value) if self.rank == root else "")[root]
        return json.loads(text)

    def gather(self, value: object) -> list[Any] | None:
        everything = self.allgather(value)
        return everything if self.rank == 0 else None

    def gather_bytes(self, data: bytes) -> list[bytes] | None:
        everything: list[bytes] = self.meet(data)
        return everything if self.rank == 0 else None

    def from_first_of_node(self, value: object) -> Any:
        return self.broadcast(value)

    def largest(self, own: Sequence[int], what: str) -> list[int]:
        return [max(numbers) for numbers in zip(*self.meet(list(own)), strict=True)]

    def gather_living(self, value: object, wait_s: float = 1.0) -> dict[int, Any] | None:
        hub = self.hub
        with hub.changed, self._waiting():
            hub.last_words[self.rank] = json.dumps(value)
            hub.changed.notify_all()
            if self.rank:
                return None
            until_s = awake.now_s() + wait_s
            while missing := set(range(self.size)) - set(hub.last_words):
                hub.check()
                if missing <= self.evicted and awake.now_s() >= until_s:
                    break
                hub.changed.wait(None if missing - self.evicted else until_s - awake.now_s())
            self.evicted |= missing
            return {rank: json.loads(text) for rank, text in sorted(hub.last_words.items())}

    def broadcast_living(self, value: object) -> Any:
        hub = self.hub
        with hub.changed, self._waiting():
            if self.rank == 0:
                hub.verdict = json.dumps(value)
                hub.changed.notify_all()
            while hub.verdict is None:
                hub.check()
                hub.changed.wait()
            return json.loads(hub.verdict)

    def sums(self, ranks: Sequence[int] | None = None) -> Sums:
        """Collective over `ranks`, all of them by default: what they add up, and hand one another."""
        key = tuple(range(self.size) if ranks is None else ranks)
        number = self._num_groups[key] = self._num_groups.get(key, 0) + 1
        return Sums(self.hub.meeting(key, number), self.rank, self._waiting)

    def broadcast_tensors(self, tensors: Sequence[Any], root: int = 0) -> None:
        self.sums().first_of(list(tensors), root)

    # ---- what carries roles

    def make_world(self, peers: Sequence[int], buffer_for: Callable[[int, Any], Any], **options: Any) -> Any:
        """A world of queues: it receives into no buffer, and computes where it stands."""
        known = {name: options[name] for name in ("on_step", "reduce", "begin") if name in options}
        return ThreadWorld(
            self.hub, self.rank, on_wait=self.wait, fails=self.fail, around=self.computing, **known
        )

    def sum_among(self, ranks: Sequence[int]) -> WorkersSum:
        return WorkersSum(self.sums(ranks))

    def computing(self) -> AbstractContextManager[None]:
        """For as long as this rank computes a gradient."""
        return self.draws.own(self.rank, self._take_turn)

    def _take_turn(self) -> None:
        """Hold the lock of random numbers; whoever has it may be stuck."""
        with self._waiting():
            while not LOCK.acquire(timeout=TURN_S):
                self.hub.check()

    def building(self) -> AbstractContextManager[Any]:
        return LOCK

    def built(self, module: Any) -> None:
        self.draws.watch(module)

    def fail(self, how: str, after_s: float = 0.0) -> None:
        if how == "raise":
            raise InjectedError("ordered by --inject")
        assert how == "wedge", f"{how} was refused before"
        self.hub.failed.wait()  # until the run is over, in one way or another
        self.hub.check()

    def end_job(self, error: BaseException) -> NoReturn:
        self.hub.fail(self.where(), error)
        raise CalledOffError(str(error)) from error
