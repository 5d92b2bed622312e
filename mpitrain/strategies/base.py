"""What a strategy is asked and what it answers.

Invariants: a strategy decides and does nothing else. It is a frozen value; its memory is a plain
JSON-able dict that the role owns and hands in; it never touches a tensor, a clock, a message or the network,
and it never asks which world it is in.

A server role asks `on_push` once per arriving push. The verdict says how much the gradient weighs (0 drops
it), whether what has been gathered is applied now (a new version, with its mean, or its sum), and
which of the waiting workers may read the model and go on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from mpitrain.codecs.base import Codec
from mpitrain.codecs.none import Uncompressed
from mpitrain.errors import UsageError
from mpitrain.strategies.damping.base import Damping
from mpitrain.strategies.damping.keep import Keep
from mpitrain.strategies.parameter_server.batch_size import Batching, PerWorker
from mpitrain.strategies.placement import PLACEMENTS
from mpitrain.strategies.warmup import Warmup
from mpitrain.values import Value, nearest


class Arrival(NamedTuple):
    """One arriving gradient.

    worker: who computed it; step: the worker's own count of pushes, from 0; read: the version it was computed
    on; version: the shard's version now; now_s: the world's clock in seconds; blocked: workers waiting for an
    answer, the pusher included; active: workers that take part now, the pusher included; reads: the versions that
    each worker computes on, the oldest first, the one that this push ends still among them.
    """

    worker: int
    step: int
    read: int
    version: int
    now_s: float
    blocked: Set[int]
    active: Set[int]
    reads: Mapping[int, Sequence[int]] = MappingProxyType({})


class ReadsLeft(NamedTuple):
    """What is being computed on: the fields of an `Arrival` by these names."""

    version: int
    reads: Mapping[int, Sequence[int]]
    blocked: Set[int]
    active: Set[int]


class Verdict(NamedTuple):
    """The answer to a push, to a worker's leaving, or to the end of a read.

    weight of the gradient (0 drops it); flush: apply what was gathered, a new version; release:
    who reads the model and goes on; late: it was dropped because its version is over, not for its staleness;
    restart: who is ordered to drop what it computes and to read the model (virtual time only).
    """

    weight: float
    flush: bool
    release: tuple[int, ...]
    late: bool = False
    restart: tuple[int, ...] = ()


WIRES = ("full", "float16", "bfloat16")
OPTIMIZERS = ("server", "worker")
AGGREGATES = ("none", "node")


def _numbers_of(wire: str | Codec) -> str:
    if isinstance(wire, str):
        return wire
    return wire.name if wire.name in WIRES else "full"


def _codec_of(wire: str | Codec) -> Codec:
    return wire if isinstance(wire, Codec) and wire.name not in WIRES else Uncompressed()


NOTHING = Verdict(0.0, False, ())


@dataclass(frozen=True, repr=False)
class Strategy(Value):
    """Base of every value that `--strategy` accepts. `placement`, `aggregate`: of servers, where there are any."""

    placement = "spread"
    aggregate = "none"

    @property
    def aggregates(self) -> bool:
        """Whether one rank of a node stands between its workers and the servers."""
        return self.aggregate == "node"

    @property
    def family(self) -> str:
        """What one strategy's checkpoints share with another's that can go on from them."""
        return self.name

    def num_servers(self) -> int:
        """Ranks this strategy takes away from the workers."""
        return 0

    def num_replicas(self, num_workers: int) -> int:
        """Batches that so many workers take at a time: one each, unless several hold one model."""
        return num_workers

    def samples_at_once(self, part_samples: int, num_workers: int) -> int:
        """How many of a step's samples one of so many workers computes at once, where a job says `part_samples`."""
        return part_samples

    def check_workers(self, num_workers: int) -> None:
        """Raise `UsageError` when so many workers, all in all, cannot run this strategy."""

    @property
    def clips_mean(self) -> bool:
        """Whether a job's `clip_norm` and `clip_value` act on the gradient that is stepped with, as a rule the mean of
        all workers'. Otherwise they act on each worker's own, before it is coded or pushed."""
        return False

    def why_not_clipped(self, by_norm: bool) -> str:
        """Empty, or why it cannot clip gradients (`by_norm`: by their norm, not only number by number)."""
        return ""

    def why_not_accumulated(self) -> str:
        """Empty, or why it cannot add up the gradients of several batches before a step."""
        return ""

    def why_not_batch_statistics(self) -> str:
        """Empty, or why BatchNorm cannot look at the batches of all workers (`sync_batchnorm`)."""
        return (
            "its workers do not meet in the forward pass, so there is no common batch to take statistics of; use "
            "allreduce() or sharded()"
        )

    def why_not_in_place(self) -> str:
        """Empty, or why what a forward pass changes of the parameters in place (`Embedding(max_norm=)`) is not kept."""
        return ""

    def why_not_joint_steps(self) -> str:
        """Empty, or why a job's `step` function cannot step several optimizers."""
        return (
            "a step function takes several steps in a batch, each from where the one before has led, and here a batch "
            "is one gradient; use allreduce()"
        )

    def why_not_sparse(self) -> str:
        """Empty, or why gradients with only the touched rows of an embedding cannot travel (`sparse=True`)."""
        return (
            f"{self.name}() sends whole gradients or parameters; allreduce() and the strategies with servers send "
            "touched rows"
        )

    def why_not_served(self) -> str:
        """Empty, or why the rows of a `ServedEmbedding` have nowhere to live."""
        return f"its rows live on parameter servers, and {self.name}() has none"

    def why_not_ended(self) -> str:
        """Empty, or why a validation cannot end the run for all workers (`patience`)."""
        return ""

    def why_not_over_mpi(self) -> str:
        """Empty, or why only a virtual world can run it."""
        return ""

    def why_not_wrapped(self) -> str:
        """Empty, or why it cannot run in somebody's own loop."""
        return ""


@dataclass(frozen=True, repr=False)
class ServerStrategy(Strategy):
    """Base of the parameter-server family: one server, every strategy a setting of it.

    Args:
        servers: number of server ranks; each owns one contiguous shard with its own version, strategy state and
            counts.
        damping: what a stale gradient is worth.
        warmup: how many workers train alone at first, and for how many epochs.
        push_wire, reply_wire: what travels: "full" for numbers as the model's own, "float16" or "bfloat16", or a codec
            such as `threshold(density=1e-3)`. A codec's residual stays on the worker, a slice for every shard; replies
            by a codec carry what has changed since that worker's last one, for which the server keeps a copy of each
            worker's shard. Sums, optimizer and the final model stay in full.
        optimizer: "server": gradients are pushed. "worker": each worker keeps an optimizer of its own and pushes what
            that has made of its parameters, after rate and momentum; the server adds the (weighted) mean of it.
        push_every, pull_every: n_push and n_fetch of Downpour SGD (Dean et al. 2012), in batches: in between the worker
            goes on with its own parameters, by the plain SGD step (server's optimizer, which must be SGD) or by its own
            optimizer's, and pushes the sum. pull_every=0: with every push.
        inflight: 2 lets a worker compute on its next batch while push and answer are under way: every gradient is then
            computed on parameters one answer older.
        batching: how large each worker's batches are.
        placement: which ranks serve when there are several nodes: "spread" evenly over them, "packed" on the first
            ones, "beside" the workers, equally many on every node.
        aggregate: "node": on every node of two workers or more one rank besides computes nothing and stands between
            them and the servers, which exchange one message with it where they would exchange one with each: it sums
            the gradients of one version where an update is the mean of all (`sync`), and elsewhere passes on those that
            have come while the server was busy, unsummed. "none": every worker speaks to the servers itself.
    """

    servers: int = 1
    damping: Damping = field(default=Keep(), metadata={"kind": "damping"})
    warmup: Warmup = field(default=Warmup(), metadata={"kind": "warmup"})

    push_wire: str | Codec = field(default="full", metadata={"kind": "codec", "words": True})
    reply_wire: str | Codec = field(default="full", metadata={"kind": "codec", "words": True})
    optimizer: str = "server"
    push_every: int = 1
    pull_every: int = 0
    inflight: int = 1
    batching: Batching = field(default=PerWorker(), metadata={"kind": "batching"})
    placement: str = "spread"
    aggregate: str = "none"

    lockstep: ClassVar[bool] = False  # whether an update is the mean of gradients of one version
    elastic: ClassVar[bool] = False  # whether a push carries parameters and is answered with a difference
    sums: ClassVar[bool] = False  # whether an update is the weighted sum of what was gathered, not its mean
    reduces: ClassVar[bool] = (
        False  # whether workers all-reduce and step what is in no table, and servers do the rest
    )
    aggregates_by: ClassVar[str] = (
        ""  # "sum", "forward", or empty where nothing stands between it and workers
    )

    @property
    def family(self) -> str:
        kind = "elastic averaging" if self.elastic else "a parameter server"
        return kind + (" with the workers' optimizers" if self.optimizer == "worker" else "")

    def check(self) -> None:
        choices = {
            "push_wire": WIRES, "reply_wire": WIRES, "optimizer": OPTIMIZERS, "placement": PLACEMENTS,
            "aggregate": AGGREGATES,
        }  # fmt: skip
        for key, known in choices.items():
            value = getattr(self, key)
            if not isinstance(value, Codec) and value not in known:
                raise UsageError(f"{self.name}: unknown {key} {value!r}{nearest(value, list(known))}")
        for key, least in (("servers", 1), ("push_every", 1), ("pull_every", 0)):
            if getattr(self, key) < least:
                raise UsageError(f"{self.name}: {key} must be at least {least}, got {getattr(self, key)}")
        if self.inflight not in (1, 2):
            raise UsageError(f"{self.name}: inflight must be 1 or 2, got {self.inflight}")
        if self.inflight == 2 and self.pulls != self.push_every:
            raise UsageError(
                f"{self.name}: inflight=2 computes while the answer to a push is under way, so every push must be "
                f"answered with parameters: leave pull_every out (it is {self.pull_every})"
            )
        if self.optimizer == "worker" and self.damping.one_gradient:
            raise UsageError(
                f'{self.name}: {self.damping.name} corrects gradients, and with optimizer="worker" finished updates '
                'are pushed: use optimizer="server", or another damping'
            )
        if self.moves and self.damping.one_gradient:
            raise UsageError(
                f"{self.name}: {self.damping.name} {self.damping.one_gradient}, computed on parameters as they were "
                f"read; with push_every={self.push_every} and pull_every={self.pulls} workers move their parameters "
                "between reads: leave both at 1, or use another damping, such as inverse() or gap_aware()"
            )

        for key, codec in (("push_wire", self.push_codec), ("reply_wire", self.reply_codec)):
            if self.elastic and not codec.is_none:
                raise UsageError(
                    f"{self.name}: {key}={codec} codes differences, and an elastic exchange carries parameters; "
                    'use "float16" or "bfloat16"'
                )
        if getattr(self.reply_codec, "momentum", 0.0) or getattr(self.reply_codec, "clip", 0.0):
            raise UsageError(
                f"{self.name}: reply_wire={self.reply_codec} carries differences of parameters, which have neither a "
                "momentum nor a norm to clip"
            )
        if self.aggregates:
            self._check_aggregate()

    def _check_aggregate(self) -> None:
        if not self.aggregates_by:
            raise UsageError(
                f'{self.name}: aggregate="node" is for sync, async, softsync and ssp: leave it out, or use one of these'
            )
        fits = {
            "push_wire": (self.push_wire == "full", "gradients are summed on their node in full numbers"),
            "damping": (self.damping == Keep(), "a sum cannot be corrected gradient by gradient"),
            "optimizer": (self.optimizer == "server", "gradients are summed, not finished updates"),
            "push_every": (not self.moves, "gradients of single batches are summed"),
            "warmup": (not self.warmup.epochs, "all workers of a node are summed, from the start"),
            "batching": (not self.batching.measures, "gradients are summed by their samples alone"),
        }
        for key, (fit, why) in fits.items():
            if self.aggregates_by == "sum" and not fit:
                raise UsageError(
                    f'{self.name}: {key}={getattr(self, key)} does not go with aggregate="node", because {why}: leave '
                    "either out"
                )

    @property
    def push_codec(self) -> Codec:
        """What codes pushes beyond a choice of numbers; `none()` where nothing does."""
        return _codec_of(self.push_wire)

    @property
    def reply_codec(self) -> Codec:
        """The same for replies."""
        return _codec_of(self.reply_wire)

    @property
    def push_numbers(self) -> str:
        """Numbers that pushes are made of: "full", "float16" or "bfloat16"; a codec starts from full ones."""
        return _numbers_of(self.push_wire)

    @property
    def reply_numbers(self) -> str:
        """The same for replies."""
        return _numbers_of(self.reply_wire)

    def samples_at_once(self, part_samples: int, num_workers: int) -> int:
        return self.batching.samples_at_once(part_samples, num_workers)

    def num_contributors(self, num_workers: int) -> int:
        """Gradients in the mean of one update: each of them is clipped at a codec's clip over its square root."""
        return 1

    @property
    def pulls(self) -> int:
        """Batches between two reads of the model."""
        return self.pull_every or self.push_every

    @property
    def moves(self) -> bool:
        """Whether workers change their parameters between reads."""
        return self.optimizer == "worker" or self.push_every > 1 or self.pulls > 1

    @property
    def clips_mean(self) -> bool:
        is_plain = self.push_codec.is_none and self.push_numbers == "full"
        return self.lockstep and is_plain and not self.moves

    def why_not_clipped(self, by_norm: bool) -> str:
        if not self.clips_mean:
            return ""
        if self.damping.corrects:
            return (
                f"{self.damping.name} changes gradients before their mean is clipped, and here no gradient is ever "
                "stale: leave damping out"
            )
        return ""

    def why_not_accumulated(self) -> str:
        if self.push_every > 1 and not self.elastic:
            return (
                f"push_every={self.push_every} pushes the sum over several batches already, and between them the "
                "worker moves its parameters; accumulate pushes one mean of batches on the same parameters: leave "
                "either out"
            )
        return ""

    def why_not_in_place(self) -> str:
        if self.elastic:
            return ""
        return f"{self.name}() has servers hold the parameters, whose next answer undoes it"

    @property
    def blocks_apart(self) -> bool:
        """Whether one shard may hold a worker for as long as a third one computes, that another has let go."""
        return False

    @property
    def needs_all(self) -> bool:
        """Whether nobody goes on without a worker that dies."""
        return self.reduces or self.aggregates

    @property
    def sums_on_nodes(self) -> bool:
        """Whether what a server is sent of a node is the sum of its workers' gradients."""
        return self.aggregates and self.aggregates_by == "sum"

    def why_not_sparse(self) -> str:
        if self.aggregates:
            return (
                'aggregate="node" passes whole gradients on, and rows of tables are asked for by each worker: leave it '
                "out"
            )
        if self.elastic or self.optimizer == "worker":
            return f"{self} moves all parameters on every worker, and rows of tables are trained by servers alone"
        if self.moves:
            return (
                f"{self} lets workers move their parameters between reads, and they hold the rows of one batch alone: "
                "leave push_every and pull_every out"
            )
        if self.damping.corrects:
            return (
                f"{self.damping.name} corrects a gradient by what its worker has read, and of tables no server "
                "remembers that: use another damping"
            )
        return ""

    def why_not_served(self) -> str:
        return self.why_not_sparse()

    def num_servers(self) -> int:
        return self.servers

    def why_not_wrapped(self) -> str:
        if self.aggregates:
            return 'aggregate="node" takes ranks that only `train` starts, not `wrap`: leave it out'
        counted = "a warm-up is counted in epochs of data, which only `train` knows, not `wrap`"
        return counted if self.warmup.epochs else ""

    def start(self, workers: tuple[int, ...]) -> dict[str, Any]:
        """The strategy's memory before the first push, when `workers` take part."""
        raise NotImplementedError

    def on_push(self, memory: dict[str, Any], arrival: Arrival) -> Verdict:
        """Decide about one push; may change `memory` in place."""
        raise NotImplementedError

    def on_join(self, memory: dict[str, Any], worker: int, active: Set[int]) -> None:
        """`worker` takes part from now on (after the warm-up); `active` are those that did before."""

    def on_leave(self, memory: dict[str, Any], worker: int, blocked: Set[int], active: Set[int]) -> Verdict:
        """`worker` will push no more; `blocked` and `active` are those that remain. The verdict's weight means
        nothing.
        """
        return NOTHING

    def on_read_ended(self, memory: dict[str, Any], left: ReadsLeft) -> Verdict:
        """Somebody's read has ended without a push that counts (it has left, or its gradient is not finite). The
        verdict's weight means nothing."""
        return NOTHING

    def contributors(self, active: Set[int]) -> Set[int] | None:
        """Who contributes to the update being gathered, where that is known beforehand: then each gradient is
        added as soon as its turn in rank order comes, and few wait. None: all wait for the flush."""
        return None
