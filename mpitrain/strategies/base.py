"""What a strategy is asked and what it answers.

Invariants: a strategy decides and does nothing else. It is a frozen value; its memory is a plain
JSON-able dict that the role owns and hands in; it never touches a tensor, a clock, a message or the network,
and it never asks which world it is in.

A server role asks `on_push` once per arriving push. The verdict says how much the gradient weighs (0 drops
it), whether what has been gathered is applied now (a new version, with its mean, or its sum), and
which of the waiting workers may read the model and go on.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, TypeVar

from mpitrain.codecs.base import Codec
from mpitrain.codecs.none import Uncompressed
from mpitrain.errors import UsageError
from mpitrain.strategies.damping.base import Damping
from mpitrain.strategies.damping.keep import Keep
from mpitrain.strategies.parameter_server.batch_size import Batching, PerWorker
from mpitrain.strategies.placement import PLACEMENTS
from mpitrain.strategies.warmup import Warmup
from mpitrain.values import Value, parse


class Arrival(NamedTuple):
    """One arriving gradient.

    worker: who computed it; step: the worker's own count of pushes, from 0; read: the version it was computed
    on; version: the shard's version now; now_s: the world's clock in seconds; blocked: workers waiting for an
    answer, the pusher included; active: workers that take part now, the pusher included; tightest, unread: of what
    this push leaves, as in `ReadsLeft`.
    """

    worker: int
    step: int
    read: int
    version: int
    now_s: float
    blocked: Set[int]
    active: Set[int]
    tightest: int | None = None
    unread: bool = False


class ReadsLeft(NamedTuple):
    """What is being computed on.

    version, blocked: as in an `Arrival`; tightest: the least of the versions that are computed on, that of a worker's
    second gradient less one, since it is used one update later at the soonest; None where nobody computes; unread:
    whether somebody takes part that is neither blocked nor computes on anything, and so is about to read.
    """

    version: int
    blocked: Set[int]
    tightest: int | None
    unread: bool


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


Chosen = TypeVar("Chosen")
WIRES = ("full", "float16", "bfloat16")
OPTIMIZERS = ("server", "worker")
AGGREGATES = ("none", "node")
# pushes in a row that are not finite: a broken device, for a batch would be one among others
MOST_NONFINITE = 10


def _numbers_of(wire: str | Codec) -> str:
    if isinstance(wire, str):
        return wire
    return wire.name if wire.name in WIRES else "full"


def _codec_of(wire: str | Codec) -> Codec:
    return wire if isinstance(wire, Codec) and wire.name not in WIRES else Uncompressed()


NOTHING = Verdict(0.0, False, ())


@dataclass(frozen=True, repr=False)
class Strategy(Value):
    """Base of every value that `--strategy` accepts. What is asked of one is asked of all: here stand the answers of a
    strategy without servers, codec or periods. `placement`, `aggregate`: of servers, where there are any."""

    placement = "spread"
    aggregate = "none"
    push_every = 1
    optimizer = "server"  # whose takes the steps
    stragglers = "finish"
    warmup = Warmup()
    asynchronous = False  # whether peers take in messages while they compute
    average_optimizer = False
    spare = 0  # workers that an update does not wait for
    stages = parallel = microbatches = 1  # of one model

    splits_model: ClassVar[bool] = False  # whether ranks hold parts of one model
    has_stages: ClassVar[bool] = False  # whether such a part is a run of whole layers
    gathers_layers: ClassVar[bool] = (
        False  # whether each rank computes whole layers, put together from all shards
    )
    all_reduces: ClassVar[bool] = (
        False  # whether each worker steps a whole replica with the mean gradient of all
    )
    lockstep: ClassVar[bool] = False  # whether an update is the mean of gradients of one version
    elastic: ClassVar[bool] = False  # whether a push carries parameters and is answered with a difference
    reduces: ClassVar[bool] = False  # whether workers all-reduce what is in no table, and servers do the rest
    sends_messages: ClassVar[bool] = False  # whether workers are sent any, and meet not in collectives alone
    wire_fields: ClassVar[tuple[str, ...]] = ()  # what numbers travel as, from the worker first
    aggregates_by: ClassVar[str] = (
        ""  # "sum", "forward", or empty where nothing stands between servers and workers
    )
    worker_role: ClassVar[str] = "worker"  # as traces name it

    def choose(self, table: Mapping[type[Strategy], Chosen]) -> Chosen:
        """The entry of a table by family: that of the strategy's class, or of the nearest base that has one."""
        return next(table[one] for one in type(self).__mro__ if one in table)

    @property
    def has_servers(self) -> bool:
        """Whether some ranks hold the parameters, or tables of them, and train nothing."""
        return self.num_servers() > 0

    @property
    def wires(self) -> tuple[str | Codec, ...]:
        """What numbers travel as: "full" for the model's own, another word, or a codec."""
        return tuple(getattr(self, key) for key in self.wire_fields)

    @property
    def push_codec(self) -> Codec:
        """What codes a worker's messages, beyond a choice of numbers; `none()` where nothing does."""
        return next((wire for wire in self.wires[:1] if isinstance(wire, Codec)), Uncompressed())

    @property
    def reply_codec(self) -> Codec:
        """The same for what servers answer."""
        return Uncompressed()

    @property
    def codes_allreduce(self) -> bool:
        """Whether gradients are averaged through a codec."""
        return self.all_reduces and not self.push_codec.is_none

    @property
    def correction(self) -> str:
        """The name of a damping that changes gradients by more than a factor; empty where none does."""
        return ""

    @property
    def steps_on_workers(self) -> bool:
        """Whether each worker steps an optimizer of its own."""
        return self.optimizer == "worker"

    @property
    def moves(self) -> bool:
        """Whether workers change their parameters between reads."""
        return False

    @property
    def mixes(self) -> bool:
        """Whether parameters are mixed (gossip), rather than updates applied by all."""
        return False

    @property
    def never_meets(self) -> bool:
        """Whether workers neither wait for one another nor meet before the end."""
        return False

    @property
    def needs_all(self) -> bool:
        """Whether nobody goes on without a worker that dies."""
        return True

    @property
    def sums_on_nodes(self) -> bool:
        """Whether what a server is sent of a node is the sum of its workers' gradients."""
        return self.aggregates and self.aggregates_by == "sum"

    @property
    def warms_up(self) -> bool:
        """Whether some of the workers train alone at first."""
        return self.warmup.epochs > 0

    @property
    def steps_in_batch(self) -> bool:
        """Whether servers take several steps in a batch, each with the gradients of all workers."""
        return False

    @property
    def begins_together(self) -> bool:
        """Whether gradients are averaged in the first steps, and not later."""
        return False

    @property
    def period_steps(self) -> int:
        """From one averaging to the next, where that is counted in steps."""
        return 1

    def after_warmup(self) -> Strategy:
        """The strategy as it is once all workers do what they do in the end."""
        changes: dict[str, Any] = {"warmup": Warmup()} if self.warms_up else {}
        return replace(self, **changes)

    def steps_to_exchange(self, num_workers: int, samples: int) -> int:
        """A worker's steps between two pushes or averagings, each of so many samples."""
        return self.push_every

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

    def messages_to_workers(self, num_workers: int) -> int:
        """That each of so many workers sends to other workers a step; 0 where they meet in collectives, or at servers
        alone."""
        return 0

    def check_workers(self, num_workers: int) -> None:
        """Raise `UsageError` when so many workers, all in all, cannot run this strategy."""

    def check_batch(self, batch_size: int) -> None:
        """Raise `UsageError` when a batch of so many samples cannot be trained like this."""

    @property
    def clips_mean(self) -> bool:
        """Whether a job's `clip_norm` and `clip_value` act on the gradient that is stepped with, as a rule the mean of
        all workers'. Otherwise they act on each worker's own, before it is coded or pushed."""
        return False


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

    sends_messages: ClassVar[bool] = True
    wire_fields: ClassVar[tuple[str, ...]] = ("push_wire", "reply_wire")

    sums: ClassVar[bool] = False  # whether an update is the weighted sum of what was gathered, not its mean

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
            if not isinstance(getattr(self, key), Codec):
                self.hold_known(key, known)
        for key, least in (("servers", 1), ("push_every", 1), ("pull_every", 0)):
            self.hold(key, getattr(self, key) >= least, f"must be at least {least}")
        self.hold("inflight", self.inflight in (1, 2), "must be 1 or 2")
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
        return _codec_of(self.push_wire)

    @property
    def reply_codec(self) -> Codec:
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
    def correction(self) -> str:
        return self.damping.name if self.damping.corrects else ""

    @property
    def moves(self) -> bool:
        return self.optimizer == "worker" or self.push_every > 1 or self.pulls > 1

    @property
    def clips_mean(self) -> bool:
        is_plain = self.push_codec.is_none and self.push_numbers == "full"
        return self.lockstep and is_plain and not self.moves

    @property
    def blocks_apart(self) -> bool:
        """Whether one shard may hold a worker for as long as a third one computes, that another has let go."""
        return False

    @property
    def needs_all(self) -> bool:
        return self.reduces or self.aggregates

    def num_servers(self) -> int:
        return self.servers

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


def read_strategy(text: str) -> Strategy:
    """The strategy that a text names."""
    strategy = parse(text, "strategy")
    assert isinstance(strategy, Strategy)
    return strategy
