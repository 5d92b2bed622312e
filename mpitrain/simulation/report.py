"""What a simulation prints: loss against virtual time, and the staleness histogram.

Invariants: text from numbers, at most 80 columns wide; nothing here knows a role or a strategy.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

from mpitrain.reporting.report import Report, report_end
from mpitrain.system.saying import tell
from mpitrain.training.measure import relative_deviation
from mpitrain.virtual import VirtualWorld

FEWEST_BATCHES = 10  # for each worker


class VirtualLog:
    """Loss against virtual time: the mean loss of each twentieth of the run, and at the end the staleness
    histogram, where there is one.
    """

    def __init__(self, report: Report, world: VirtualWorld, num_pushes: int, quiet: bool):
        self.report, self.world, self.quiet = report, world, quiet
        self.curve: list[dict[str, float]] = []
        self.paused_s = 0.0  # virtual seconds in which nothing was trained, as a run over MPI counts them
        self._every = max(1, num_pushes // 20)
        self._losses: list[float] = []
        self._num_ends = 0  # of the job, that are reported

    def progress(self, samples: int, step: int, epoch: int, loss: float, **fields: object) -> None:
        """One push was taken."""
        now_s = self._now_s()
        self.report.progress(samples, step, epoch, loss, virtual_s=now_s, **fields)
        self._losses.append(loss)
        if len(self._losses) == self._every:
            mean = sum(self._losses) / len(self._losses)
            self.curve.append({"virtual_s": now_s, "samples": samples, "loss": mean})
            self._losses.clear()

    def pause(self, seconds: float) -> None:
        """So much virtual time went into something that is not training."""
        self.paused_s += seconds

    def until_now(self) -> None:
        """All virtual time counts."""

    def event(self, name: str, **fields: object) -> None:
        """A validation or another note."""
        self.report.event(name, virtual_s=self._now_s(), **fields)

    def _now_s(self) -> float:
        """Of the virtual clock; what has ended the job until now is reported first."""
        now_s, outages = self.world.elapsed_s, self.world.outages
        if outages is not None and outages.num_ends > self._num_ends:
            self._num_ends = outages.num_ends
            self.report.event(
                "restart", virtual_s=now_s, restarts=outages.num_ends, repeated_s=outages.repeated_s,
                starting_s=outages.starting_s,
            )  # fmt: skip
        return now_s

    def warn_if_short(self, num_batches: int, num_workers: int) -> None:
        """Say so where a run has too few batches for its seconds to mean what those of a long one do."""
        each = num_batches / num_workers
        if each < FEWEST_BATCHES:
            self.event(
                "few batches",
                warning=f"{num_batches} batches are {each:.1f} for each of {num_workers} workers: with fewer than "
                f"{FEWEST_BATCHES}, beginning and end weigh more than the middle, and samples per second say little "
                "about a long run. Raise --epochs or --steps, or lower --workers",
            )

    def spread(self) -> float | None:
        """Of the samples per virtual second in the windows of the curve, as `Windows.spread` of a real run."""
        marks = [(0.0, 0.0), *((point["virtual_s"], point["samples"]) for point in self.curve)]
        return relative_deviation(
            [
                (samples - before) / (now_s - then_s)
                for (then_s, before), (now_s, samples) in pairwise(marks)
                if now_s > then_s
            ]
        )

    def finish(self, result: dict[str, Any]) -> None:
        """Print the curve and the histogram, write `result.json`, print the FOM line."""
        report_end(self.report, result)
        if not self.quiet:
            histogram = result.get("staleness_histogram", {})
            tell(render(self.curve, histogram, result.get("staleness_mean", 0.0)))
        self.report.finish(result)


def render(curve: list[dict[str, float]], histogram: dict[str, int], mean: float) -> str:
    """The two tables that `mpitrain simulate` prints, at most 80 columns wide."""
    top = max((point["loss"] for point in curve if math.isfinite(point["loss"])), default=1.0) or 1.0
    lines = [f"{'virtual s':>10} {'samples':>9} {'loss':>9}"]
    for point in curve:
        bar = "#" * round(40 * point["loss"] / top) if math.isfinite(point["loss"]) else "not finite"
        lines.append(f"{point['virtual_s']:10.2f} {point['samples']:9.0f} {point['loss']:9.4f} {bar}")
    if not histogram:
        return "\n".join(lines)
    lines += ["", f"{'staleness':>10} {'pushes':>9}   mean {mean:.3f}"]
    most = max(histogram.values(), default=1)
    lines += [
        f"{tau:>10} {count:9d} {'#' * max(1, round(40 * count / most))}" for tau, count in _folded(histogram)
    ]
    return "\n".join(lines)


def _folded(histogram: dict[str, int], num_rows: int = 24) -> list[tuple[str, int]]:
    """The histogram with neighbouring values put together until it fits on a screen."""
    values = sorted((int(tau), count) for tau, count in histogram.items())
    if not values or values[-1][0] - values[0][0] < num_rows:
        return [(str(tau), count) for tau, count in values]
    width = -(-(values[-1][0] + 1) // num_rows)
    rows: dict[int, int] = {}
    for tau, count in values:
        rows[tau // width] = rows.get(tau // width, 0) + count
    return [(f"{row * width}-{row * width + width - 1}", count) for row, count in sorted(rows.items())]
