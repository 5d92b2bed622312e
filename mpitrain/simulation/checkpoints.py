"""Checkpoints in virtual time: roles write them when those of a run over MPI would, and what they cost is charged.

Invariants: nothing reaches a disk. As over MPI, a rank copies its part, which holds it up, and a thread writes the copy
meanwhile; at most one write is under way, and a second waits for it. A checkpoint is whole when the last of its parts
is. All seconds are useful ones (`virtual/outages.py`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from mpitrain.errors import UsageError
from mpitrain.inject import Crash, FileFault, Injection
from mpitrain.roles.peer_checkpoints import PeerCheckpoints
from mpitrain.strategies.base import ServerStrategy
from mpitrain.strategies.checkpoint_policy import Cadence, CheckpointPolicy, read_policy
from mpitrain.strategies.decentralized import Decentralized
from mpitrain.strategies.model_parallel.mesh_layout import Grid
from mpitrain.strategies.part_names import own_part
from mpitrain.strategies.placement import Roles
from mpitrain.virtual import Costs, VirtualWorld
from mpitrain.virtual.outages import Outages


@dataclasses.dataclass(frozen=True)
class StateBytes:
    """Bytes of what a run would have to keep: all trained parameters, the optimizer's state of them, and the buffers of
    a module."""

    parameters: float = 0.0
    optimizer: float = 0.0
    buffers: float = 0.0

    @property
    def replica(self) -> float:
        """Of all of it."""
        return self.parameters + self.optimizer + self.buffers


class Checkpoints:
    """All checkpoints of a virtual run, and what ends it before its time.

    Args:
        world: whose clock counts, and which learns how much later it is.
        policy: when a checkpoint is due.
        costs: of a copy, of a write and of a start.
        injections: those that end the job, or damage a part.
        seed: of the run.
    """

    def __init__(
        self, world: VirtualWorld, policy: CheckpointPolicy, costs: Costs,
        injections: Sequence[Injection] = (), seed: int = 0,
    ):  # fmt: skip
        self.world, self.policy, self.costs = world, policy, costs
        self.damaged = {(one.part, one.at_write) for one in injections if isinstance(one, FileFault)}
        self.num_whole = 0
        self._writers: dict[int, VirtualWriter] = {}  # by rank
        self._ends_s: dict[int, dict[str, float]] = {}  # by checkpoint and part: when it is written
        self._expected: dict[int, tuple[float, Collection[str]]] = {}  # when it was taken, its parts
        crashes = [one for one in injections if isinstance(one, Crash)]
        self.outages: Outages | None = None
        if crashes or costs.restart_s:
            at_s = [one.at_s for one in crashes if one.at_s is not None]
            self.outages = Outages(costs.restart_s, _mtbf_s(injections), at_s, seed)
            world.outages = self.outages

    @property
    def are_due(self) -> bool:
        """Whether the policy ever asks for one."""
        return self.policy != CheckpointPolicy()

    def writer(
        self, rank: int, part: str, num_bytes: float, writers: tuple[int, ...] = (),
        is_due: Callable[[], bool] | None = None,
    ) -> VirtualWriter:  # fmt: skip
        """Of the part that this rank writes. `writers`: as for a `CheckpointWriter`; `is_due`: whether the next task
        that may write does, where that is not certain."""
        self._writers[rank] = VirtualWriter(self, part, num_bytes, writers, is_due)
        return self._writers[rank]

    def of_peer(
        self, rank: int, num_peers: int, strategy: Decentralized, state: StateBytes, may_end: bool = False
    ) -> PeerCheckpoints | None:
        """How a peer writes its part with the others, and how they agree to end where a validation may end the run
        (`may_end`); nothing where peers never meet."""
        if not (self.are_due or may_end) or strategy.never_meets:
            return None
        # what all held when they met last, and the codec's residual
        kept = state.parameters * (1 if strategy.codec.is_none else 2)
        writer = self.writer(rank, own_part(rank), state.replica + kept)
        parts = [own_part(one) for one in range(num_peers)] if rank == 0 else []
        return PeerCheckpoints(writer, parts, Cadence(self.policy), strategy.asynchronous)

    def hold_up_s(self, rank: int) -> float:
        """Seconds for which writing now holds this rank up."""
        return self._writers[rank].hold_up_s() if rank in self._writers else 0.0

    def written(
        self, checkpoint_at: int, part: str, taken_s: float, ends_s: float, parts: Sequence[str]
    ) -> None:
        """A part is there at `ends_s`; `parts`: all of the checkpoint, where the rank knows them."""
        self._ends_s.setdefault(checkpoint_at, {})[part] = ends_s
        if parts:
            self._expected[checkpoint_at] = taken_s, parts
        if checkpoint_at not in self._expected:
            return
        taken_s, expected = self._expected[checkpoint_at]
        ended = self._ends_s[checkpoint_at]
        if not set(expected) <= ended.keys():
            return
        whole_s = max(ended.values())
        self.num_whole += math.isfinite(whole_s)
        if self.outages is not None:
            self.outages.keep(taken_s, whole_s)
        del self._expected[checkpoint_at], self._ends_s[checkpoint_at]

    def summary(self) -> dict[str, Any]:
        """What they have cost, for `result.json`; nothing where none was due and nothing ended the job."""
        found: dict[str, Any] = {}
        writers = self._writers.values()
        if self.are_due and writers:
            found["checkpoints"] = {
                "num_written": self.num_whole,
                "num_bytes": int(sum(one.num_bytes * one.num_written for one in writers)),
                "copy_s": sum(one.copied_s for one in writers),
                "write_s": sum(one.wrote_s for one in writers),
                "wait_s": sum(one.waited_s for one in writers),
            }
        if self.outages is not None:
            found["restarts"] = {
                "num_restarts": self.outages.num_ends,
                "repeated_s": self.outages.repeated_s,
                "starting_s": self.outages.starting_s,
            }
            found["leg"] = 1 + self.outages.num_ends
        return found


class VirtualWriter:
    """One rank's part of every checkpoint: `roles.protocols.CheckpointWriter`."""

    writes_last = False  # nobody goes on from the end of a virtual run

    def __init__(
        self, checkpoints: Checkpoints, part: str, num_bytes: float, writers: tuple[int, ...] = (),
        is_due: Callable[[], bool] | None = None,
    ):  # fmt: skip
        self.checkpoints, self.part, self.num_bytes = checkpoints, part, num_bytes
        self.writers, self._is_due = writers, is_due
        costs = checkpoints.costs
        self._copy_s, self._write_s = costs.copy_s(num_bytes), costs.seconds("checkpoint", num_bytes)
        self._last_s = self._busy_until_s = 0.0
        self.num_written = 0
        self.copied_s = self.wrote_s = self.waited_s = 0.0

    def time_is_up(self) -> bool:
        """Whether the policy counts time, and so much has passed since the last checkpoint."""
        now_s, cost_s = self.checkpoints.world.now_s, self._write_s if self.num_written else None
        interval_s = self.checkpoints.policy.interval_s(cost_s)
        return self._busy_until_s <= now_s and now_s - self._last_s >= interval_s

    def next_checkpoint_at(self, samples: int) -> int:
        """Accepted samples at which to write next, 0 while nothing is due; the dealing server asks."""
        policy = self.checkpoints.policy
        if policy.samples:
            return policy.next_checkpoint_at(samples)
        return samples + 1 if self.time_is_up() else 0

    def asked(self) -> bool:
        """Nobody sends signals."""
        return False

    def hold_up_s(self) -> float:
        """Of writing now: the write before it, and the copy."""
        if self._is_due is not None and not self._is_due():
            return 0.0
        return self._waits_s() + self._copy_s

    def try_out(self, role_state: Callable[[], dict[str, Any]]) -> None:
        """Nothing is written."""

    def save(self, checkpoint_at: int, role_state: dict[str, Any], parts: Sequence[str]) -> None:
        """The copy is made from now on, and written after that."""
        now_s, waits_s = self.checkpoints.world.now_s, self._waits_s()
        self._last_s = now_s + waits_s + self._copy_s
        self._busy_until_s = self._last_s + self._write_s
        self.waited_s, self.copied_s = self.waited_s + waits_s, self.copied_s + self._copy_s
        self.wrote_s += self._write_s
        number, self.num_written = self.num_written, self.num_written + 1
        ends_s = math.inf if (self.part, number) in self.checkpoints.damaged else self._busy_until_s
        self.checkpoints.written(checkpoint_at, self.part, now_s, ends_s, parts)

    def _waits_s(self) -> float:
        return max(0.0, self._busy_until_s - self.checkpoints.world.now_s)


class StepCheckpoints:
    """When ranks that all take the same steps write a checkpoint, between two of them.

    Args:
        checkpoints: of the run.
        parts: (name of the part, its bytes) of every rank that writes, the first rank's among them.
        samples: how many are trained by now.
        may_write: whether all ranks hold the same now.
    """

    def __init__(
        self, checkpoints: Checkpoints, parts: Mapping[int, tuple[str, float]], samples: Callable[[], int],
        may_write: Callable[[], bool] = lambda: True,
    ):  # fmt: skip
        self._samples, self._may_write = samples, may_write
        self._cadence = Cadence(checkpoints.policy)
        self._names = tuple(name for name, _ in parts.values())
        self._writers = {
            rank: checkpoints.writer(rank, name, num_bytes, is_due=self.is_due)
            for rank, (name, num_bytes) in parts.items()
        }

    def is_due(self) -> bool:
        """Whether to write now; by time the first rank decides."""
        due = self._cadence.is_due(self._samples()) or self._writers[0].time_is_up()
        return due and self._may_write()

    def write_due(self) -> dict[int, float]:
        """Write where one is due; seconds for which that holds the ranks up that write."""
        if not self.is_due():
            return {}
        held_s = {rank: writer.hold_up_s() for rank, writer in self._writers.items()}
        samples = self._samples()
        for rank, writer in self._writers.items():
            writer.save(samples, {}, () if rank else self._names)  # the first rank knows all parts
        self._cadence.go_on_from(samples)
        return held_s


def parts_in_lockstep(
    num_ranks: int, state: StateBytes, grid: Grid | None = None, coded: bool = False, apart: bool = False
) -> dict[int, tuple[str, float]]:
    """What ranks write that take the same steps: the first one what all hold; of a split model (`grid`) the ranks of
    the first replica their parts; and every rank what a codec has kept back (`coded`), or what its own optimizer
    remembers (`apart`)."""
    if apart:
        own = state.optimizer + state.buffers
        return {rank: (own_part(rank), own if rank else state.replica) for rank in range(num_ranks)}
    if grid is None:
        kept = state.parameters if coded else 0.0
        ranks = range(num_ranks if coded else 1)
        return {rank: (own_part(rank), kept + (0.0 if rank else state.replica)) for rank in ranks}
    each = (state.parameters + state.optimizer) / grid.num_parts
    places = {
        rank: place for rank in range(num_ranks) for replica, place in [grid.place(rank)] if not replica
    }
    return {
        rank: (own_part(place), each + (0.0 if place else state.buffers)) for rank, place in places.items()
    }


def writers_over_servers(
    checkpoints: Checkpoints, strategy: ServerStrategy, roles: Roles, shares: Mapping[int, float], state: StateBytes,
    hooked: bool = False,
) -> dict[int, VirtualWriter]:  # fmt: skip
    """Of the ranks that write: every server its shard, and every worker what it has of its own, or, where that is
    nothing, the worker that validates its buffers.

    Args:
        shares: of the parameters, by server; hooked: whether the optimizer has hooks.
    """
    coded, moves = not strategy.push_codec.is_none, strategy.optimizer == "worker"
    own = roles.workers if coded or moves or hooked else (roles.validator,)
    shard = state.parameters + (0.0 if moves else state.optimizer)
    mine = state.buffers + (state.optimizer if moves else 0.0) + (state.parameters if coded else 0.0)
    mine += state.parameters if strategy.elastic else 0.0
    found = {
        rank: checkpoints.writer(rank, f"shard-{number}", shard * shares[rank], own)
        for number, rank in enumerate(roles.servers)
    }
    return found | {
        rank: checkpoints.writer(rank, f"worker-{roles.workers.index(rank)}", mine) for rank in own
    }


def policy_of(
    job: Any, checkpoint_every: str | None, costs: Costs, injections: Sequence[Injection]
) -> CheckpointPolicy:
    """When checkpoints are due in virtual time: as the job says, where anything is asked about them; or else never,
    because they would cost nothing and serve nobody. `auto` knows how often crashes are ordered.

    Args:
        checkpoint_every: what was asked for besides the job.

    Raises:
        UsageError: the job counts something, and its peers never meet to write; or a checkpoint is to be damaged, and
            none is written.
    """
    asked = checkpoint_every is not None or costs.checkpoint_gb_per_s or costs.restart_s
    asked = asked or any(isinstance(one, Crash | FileFault) for one in injections)
    mtbf_s = min(_mtbf_s(injections), job.mtbf_s)
    policy = read_policy(job.checkpoint_every, mtbf_s) if asked else CheckpointPolicy()
    damaged = [one for one in injections if isinstance(one, FileFault)]
    if damaged and policy == CheckpointPolicy():
        raise UsageError(
            f'--inject "{damaged[0]}" damages a checkpoint, and checkpoint_every={job.checkpoint_every!r} writes none'
        )
    return policy


def _mtbf_s(injections: Sequence[Injection]) -> float:
    """Mean time between two crashes, of all laws together; infinite without any."""
    rate = sum(1 / one.mtbf_s for one in injections if isinstance(one, Crash) and one.mtbf_s)
    return 1 / rate if rate else math.inf
