"""The integer counts of one shard, and the identity they must satisfy.

Every update adds one to the staleness of every read that is in flight and not consumed by it. So after any
number of updates

    sum(tau applied) + sum(tau dropped) + sum(tau unused) + sum(tau in flight)  ==  sum over updates of the
    reads it left in flight

exactly, for any speeds; with N workers that always have R reads in flight the right side is T(N R - 1). A read
that is used for several pushes (no pull in between) counts as one
read for each, the later ones begun when the first was. `identity()` returns both sides; a run in which they
differ has lost or doubled a gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any


class LeastOf:
    """Numbers that come and go, with the least of them at hand: it is looked for upwards from where it was, so that all
    looks together take steps in proportion to what the numbers rise by."""

    def __init__(self) -> None:
        self._count: dict[int, int] = {}
        self._low = 0  # no number is less

    def exchange(self, old: int | None, new: int | None) -> None:
        """One of the numbers goes, another one comes; None is no number."""
        if new is not None:
            self._low = min(self._low, new) if self._count else new
            self._count[new] = self._count.get(new, 0) + 1
        if old is not None:
            self._count[old] -= 1
            if not self._count[old]:
                del self._count[old]

    def least(self) -> int | None:
        """None where there is no number."""
        while self._count and self._low not in self._count:
            self._low += 1
        return self._low if self._count else None


def _tightest_of(reads: Sequence[int]) -> int | None:
    return min((read - place for place, read in enumerate(reads)), default=None)


class ShardCounts:
    """Counts pushes by fate, keeps the staleness histogram, and knows which versions are being computed
    on.
    """

    def __init__(self) -> None:
        self.version = 0
        self.accepted = self.dropped = self.nonfinite = self.late = 0
        self.repeated = 0  # pushes of what had been processed before: answered, and nothing else
        self.versions_skipped = 0  # by workers that read a later one: versions, no gradients
        self.samples_accepted = self.samples_dropped = 0
        self.pushed_bytes = self.replied_bytes = 0
        self.staleness: Counter[int] = Counter()
        self.reads: dict[int, list[int]] = {}  # versions being computed on, the oldest first
        self._num_reads = 0  # in all of `reads`
        self._tightest = LeastOf()  # of each worker's reads
        self._last_read: dict[int, int] = {}
        self._tau_lost = 0
        self._left_in_flight = 0

    def read(self, worker: int, num_bytes: int, uses: int = 1) -> None:
        """`worker` is sent the present version and will compute on it for `uses` pushes; those since its last read
        it has skipped.
        """
        self.versions_skipped += max(0, self.version - self._last_read.get(worker, self.version) - 1)
        self._change(worker, [*self.reads.get(worker, ()), *[self.version] * uses])
        self._last_read[worker] = self.version
        self.replied_bytes += num_bytes

    def oldest_read(self, worker: int) -> int:
        """The version that the next push of `worker` was computed on."""
        return self.reads[worker][0]

    def tightest(self, ended: int | None = None) -> int | None:
        """Of the reads, those of later gradients of a worker less so many versions, the least; without the oldest one
        of the worker `ended`."""
        if ended is None:
            return self._tightest.least()
        own = self.reads[ended]
        self._tightest.exchange(_tightest_of(own), _tightest_of(own[1:]))
        least = self._tightest.least()
        self._tightest.exchange(_tightest_of(own[1:]), _tightest_of(own))
        return least

    def push(
        self,
        worker: int,
        num_samples: int,
        num_bytes: int,
        weight: float,
        finite: bool = True,
        late: bool = False,
        keep: bool = False,
    ) -> int:
        """A push ends its worker's oldest read, unless the worker will `keep` it for the next; returns its staleness.
        Weight 0 drops it: as `late` when its version was over, as not finite, or for its staleness."""
        staleness = self._end_read(worker, num_bytes, keep)
        if finite and weight > 0:
            self.accepted += 1
            self.samples_accepted += num_samples
            self.staleness[staleness] += 1
        else:
            self.samples_dropped += num_samples
            self._tau_lost += staleness
            self.nonfinite += not finite
            self.late += finite and late
            self.dropped += finite and not late
        return staleness

    def repeat(self, worker: int, num_bytes: int, keep: bool = False) -> None:
        """A push of what this shard has processed before: its read goes unused."""
        self._tau_lost += self._end_read(worker, num_bytes, keep)
        self.repeated += 1

    def _end_read(self, worker: int, num_bytes: int, keep: bool) -> int:
        staleness = self.version - self.reads[worker][0]
        if keep:
            self._left_in_flight += staleness
        else:
            self._take(worker)
        self.pushed_bytes += num_bytes
        return staleness

    def update(self) -> None:
        """What was gathered has been applied: a new version."""
        self.version += 1
        self._left_in_flight += self._num_reads

    def _take(self, worker: int) -> int:
        version, *later = self.reads[worker]
        self._change(worker, later)
        return version

    def _change(self, worker: int, reads: list[int]) -> None:
        before = self.reads.get(worker, [])
        self._tightest.exchange(_tightest_of(before), _tightest_of(reads))
        self._num_reads += len(reads) - len(before)
        if reads:
            self.reads[worker] = reads
        else:
            self.reads.pop(worker, None)

    def leave(self, worker: int) -> None:
        """`worker` will not push what it computes on what it has read; those versions go unused."""
        while worker in self.reads:
            self._tau_lost += self.version - self._take(worker)

    def begin_anew(self, forget: bool) -> None:
        """After a restart nothing that was read is computed on any more; `forget`: the workers are others, too."""
        for worker in list(self.reads):
            self.leave(worker)
        if forget:
            self._last_read.clear()

    def abort(self, worker: int) -> None:
        """`worker` is stopped in the middle of its gradient."""
        self.late += 1
        self.leave(worker)

    def overtaken(self, worker: int, num_samples: int, num_bytes: int) -> None:
        """A push that was under way when its worker was stopped: it has been counted as late, and what the
        worker was sent instead goes unused."""
        self.leave(worker)
        self.samples_dropped += num_samples
        self.pushed_bytes += num_bytes

    def identity(self) -> tuple[int, int]:
        """Both sides of the staleness identity; equal, or something was lost."""
        applied = sum(tau * count for tau, count in self.staleness.items())
        in_flight = sum(self.version - read for reads in self.reads.values() for read in reads)
        return applied + self._tau_lost + in_flight, self._left_in_flight

    def staleness_mean(self) -> float:
        """Mean staleness of the accepted gradients; 0 when there are none."""
        return sum(tau * count for tau, count in self.staleness.items()) / max(1, self.accepted)

    def summary(self) -> dict[str, Any]:
        """What goes into `result.json`."""
        left, right = self.identity()
        return {
            "version": self.version,
            "accepted": self.accepted,
            "late": self.late,
            "dropped": self.dropped,
            "nonfinite": self.nonfinite,
            "versions_skipped": self.versions_skipped,
            "samples_accepted": self.samples_accepted,
            "samples_dropped": self.samples_dropped,
            "repeated": self.repeated,
            "pushed_bytes": self.pushed_bytes,
            "replied_bytes": self.replied_bytes,
            "staleness_mean": self.staleness_mean(),
            "staleness_max": max(self.staleness, default=0),
            "staleness_histogram": {str(tau): self.staleness[tau] for tau in sorted(self.staleness)},
            "staleness_identity": [left, right],
        }

    def state(self) -> dict[str, Any]:
        """Everything, JSON-able."""
        derived = ("_num_reads", "_tightest")
        fields = {name: value for name, value in vars(self).items() if name not in derived}
        fields["staleness"] = {str(tau): count for tau, count in self.staleness.items()}
        fields["reads"] = {str(worker): list(versions) for worker, versions in self.reads.items()}
        fields["_last_read"] = {str(worker): version for worker, version in self._last_read.items()}
        return fields

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""
        vars(self).update(state)
        self.staleness = Counter({int(tau): count for tau, count in state["staleness"].items()})
        self.reads, self._num_reads, self._tightest = {}, 0, LeastOf()
        for worker, versions in state["reads"].items():
            self._change(int(worker), list(versions))
        self._last_read = {int(worker): version for worker, version in state["_last_read"].items()}


def disagreement(shards: Sequence[dict[str, Any]]) -> str:
    """Why these summaries cannot be those of one run, in which every shard processes every push once; empty if they
    can. Where nothing is discarded all shards have accepted the same."""
    discards = any(one["late"] or one["dropped"] or one["nonfinite"] for one in shards)
    counts = [one["samples_accepted"] + one["samples_dropped"] * discards for one in shards]
    if len(set(counts)) < 2:
        return ""
    differences = ", ".join(
        f"shard {number} has accepted {one['samples_accepted']} samples and discarded {one['samples_dropped']}"
        for number, one in enumerate(shards)
    )
    return (
        f"the shards do not agree on what they were trained on: {differences}. The model is not to be trusted; this is "
        "a defect of mpitrain: please report it, and go on from an earlier checkpoint with servers=1"
    )
