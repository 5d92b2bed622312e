"""What the roles need of their surroundings: a store, a replica and a report, opaque to them.

Invariants: protocols only. Whoever implements them knows torch; the roles do not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from mpitrain.effects import Reduction
from mpitrain.messages import Lease, Payload
from mpitrain.strategies.sampling.peer_partition import Turn


class Store(Protocol):
    """A shard of the model with its optimizer, opaque to the role."""

    def add(self, worker: int, payload: object, weight: float, share: float = 1.0) -> None:
        """Gather one gradient of `weight`, which has this share (of any unit) in the mean of the update; the store
        releases it when it is done with it."""

    def hear_options(self, text: str) -> None:
        """What came with the gradient that is added next: options of the optimizer that its worker has changed."""

    def correct(self, worker: int, payload: object, num_reads: int) -> Any:
        """Where the damping corrects gradients: this one, on arrival, for what has changed since the read it was
        computed on, the oldest of the worker's newest `num_reads`."""

    def mask(self, payload: object, spans: list[tuple[int, int]]) -> Any:
        """A gradient that is zero in `spans`, [start, end) of this shard's numbers; takes it over."""

    def apply(self) -> None:
        """Take one optimizer step with the mean of what has been gathered."""

    def follow(self, samples: int, num_workers: int) -> None:
        """The update to come is the one after so many accepted samples, with so many workers."""

    def average(self) -> Payload:
        """The moving average of the shard, a copy; asked where the job keeps one."""

    def read(self, worker: int, full: bool = False, uses: int = 1) -> Payload:
        """The present parameters for `worker`, which will compute `uses` pushes on them (or the difference that answers
        its elastic push), unchanged for as long as the payload is held; `full`: the parameters, unrounded."""


class NodeSums(Protocol):
    """Adds up the gradients of one node, opaque to the role."""

    def add(self, total: Any, others: Sequence[tuple[float, Any]]) -> None:
        """Add `factor * gradient` of each of the others, in this order, to `total`; the others are released."""


@runtime_checkable
class TabledStore(Store, Protocol):
    """The same, of a model with tables."""

    def arrive(self, worker: int, payload: object) -> Any:
        """A push in the form in which it is added, and what its worker wants to read next
        remembered; takes the payload over."""

    def rows(self, payload: object, full: bool) -> Payload:
        """The rows that the payload asks for, as they are now, unrounded if `full`; takes it over."""

    def mask_rows(self, payload: object, pieces: set[int]) -> None:
        """Leave rows out of a push that were these old shards', of those that this one was put together from."""


class Report(Protocol):
    """Where progress goes; does nothing except on the rank that logs."""

    def progress(self, samples: int, step: int, epoch: int, loss: float, **fields: object) -> None: ...
    def event(self, name: str, **fields: object) -> None: ...


class Gradient(Protocol):
    """What one batch gave."""

    @property
    def loss(self) -> float: ...
    @property
    def samples(self) -> int: ...
    @property
    def finite(self) -> bool: ...
    @property
    def share(self) -> float:
        """What it is the mean of: samples, or the weight that the loss names."""

    @property
    def options(self) -> str:
        """Options of the server's optimizer that have changed, as JSON text; empty where none has."""

    @property
    def goes_on(self) -> bool:
        """Whether there is more of the batch: a step within it is pushed, and then `gradient` asked for again."""


class Replica(Protocol):
    """The worker's copy of the model with its data, opaque to the role."""

    def load(self, shard: int, payload: Payload) -> None:
        """Take over the parameters of one shard; the replica releases the payload."""

    def subtract(self, shard: int, payload: Payload) -> None:
        """Move the parameters of one shard by minus the payload, which the replica releases."""

    def prefetch(self, lease: Lease) -> None:
        """This batch will be computed on soon."""

    def progress(self, samples: int, living: float = 1.0) -> None:
        """So many samples have been accepted, and this part of the workers is not lost: what a schedule on the worker
        follows."""

    def hear_figures(self, text: str) -> None:
        """Validations have given figures (`Figures.told`), which a schedule on the worker may follow."""

    def gradient(self, lease: object, step: int) -> Gradient | None:
        """Forward and backward; None ends the work (only where the caller brings the data)."""

    def take_push(self) -> list[Any]:
        """What to push for all batches since the last push: one Payload a shard, in shard order."""

    def finish(self) -> None:
        """All that was pushed has been answered, and either nothing is computed after it or the state is saved."""

    def before_final(self) -> None:
        """What is loaded next is the final model; the state to be saved stays that of before."""

    def validate(self, samples: int | None = None) -> dict[str, float]:
        """Metrics of the present parameters; empty when there is nothing to validate. `samples`: accepted so far, where
        the figures count for the choice of the best."""

    def statistics(self) -> dict[str, float]:
        """What a codec has to report of the messages; empty without one."""


@runtime_checkable
class TabledReplica(Replica, Protocol):
    """The same, of a model with tables."""

    def missing(self, lease: object, step: int) -> dict[int, Payload]:
        """For each shard a question for the rows that this batch needs and are not here. A
        `gradient` that comes upon further ones returns None."""

    def hold(self, shard: int, payload: Payload) -> None:
        """Take the rows that were asked for; the payload is released."""

    def look_ahead(self, lease: object, step: int) -> None:
        """The answer to the push that is taken next is to bring the rows of this batch; None: of none."""

    def missing_of_model(self) -> dict[int, Payload]:
        """For each shard a question for rows that belong to the final model; none once all are here."""

    def hold_model(self, shard: int, payload: Payload) -> None:
        """Take rows of the final model; the payload is released."""


@runtime_checkable
class ReducingReplica(Replica, Protocol):
    """The same, where workers exchange a part of the model among themselves."""

    def reduction(self, is_finite: bool) -> Reduction:
        """What the worker brings to the all-reduce after a push, or after one that is not finite."""


class CheckpointWriter(Protocol):
    """Writes this rank's part of a checkpoint, with the tensors that belong to it; `writers` are the worker ranks that
    write one too."""

    @property
    def writers(self) -> tuple[int, ...]: ...

    @property
    def writes_last(self) -> bool:
        """Whether the end of a run is written, too."""

    def time_is_up(self) -> bool:
        """Whether the policy counts time, and so much has passed since the last checkpoint."""

    def next_checkpoint_at(self, samples: int) -> int:
        """Accepted samples at which to write next; 0 while nothing is due."""

    def asked(self) -> bool:
        """Whether this process has been asked to end."""

    def try_out(self, role_state: Callable[[], dict[str, Any]]) -> None:
        """Refuse what no checkpoint can hold; called at the start, and after every update."""

    def save(self, checkpoint_at: int, role_state: dict[str, Any], parts: list[str] | tuple[()]) -> None:
        """Write in the background; `parts`: names of all that make the checkpoint complete (the first part knows)."""


class PeerMeasures(Protocol):
    """A peer's validation set, and what measures on it, opaque to the role."""

    def alone(self, samples: int | None) -> dict[str, float]:
        """Metrics of what this peer holds (`samples`: as in `Replica`)."""

    def show(self) -> Any:
        """What this peer holds, as a payload with `hold`, held once."""

    def part_of(self, rank: int, size: int) -> float:
        """How much of the validation set that is, of 1."""

    def share(self, rank: int, size: int, shown: Any) -> Payload:
        """What one of `size` peers measures of that."""

    def join(self, results: list[Payload]) -> Payload:
        """The results of several peers as one."""

    def conclude(self, results: list[Payload], samples: int | None) -> dict[str, float]:
        """The metrics, of the results of all peers."""


class PeerReplica(Protocol):
    """A peer's model, data and messages, opaque to the role. Payloads handed in are the replica's to release."""

    def step(self, turn: Turn) -> Gradient:
        """Forward, backward and the peer's own optimizer step over the turn's lease."""

    def prefetch(self, lease: Lease) -> None:
        """This batch will be computed on next."""

    def update(self) -> Any:
        """What to send the others of the step; a Payload with `hold`, held once."""

    def apply(self, payload: object, num_peers: int) -> None:
        """Full topology: take in one peer's update (also the peer's own) of `num_peers`."""

    def copy(self, source: int, payload: object) -> None:
        """Gossip: bring the copy of `source` up to date (also the peer's own)."""

    def mix(self, rank: int, weights: dict[int, float], rate: float) -> None:
        """Gossip: move towards the copies."""

    def end_step(self) -> None:
        """A step is over, with all that was taken in."""

    def hear_figures(self, text: str) -> None:
        """Validations have given figures, which the rates may follow."""

    def total(self) -> Any:
        """The parameters, as a payload that sums can be added to."""

    def add(self, total: object, other: object) -> Any:
        """total + other, as one payload."""

    def divide(self, total: object, count: int) -> Any:
        """total / count, as one payload."""

    def settle_mean(self, mean: object) -> float:
        """Take the mean of all peers; returns how far this peer was from it, relative to its length."""

    def digest(self) -> str:
        """Short text that is equal for equal bits."""

    def validate(self, samples: int | None = None) -> dict[str, float]:
        """Metrics of the present parameters; empty where there is nothing to validate (`samples`: as in `Replica`)."""

    def statistics(self) -> dict[str, float]:
        """What the codec has to report of the last message."""
