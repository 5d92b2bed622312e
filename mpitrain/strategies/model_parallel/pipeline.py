"""A model split by layers: stage s holds a run of layers, activations go down the pipeline, gradients up.

    gradient = mean over the M microbatches of the batch of g(microbatch)
    idle share of a schedule whose stages take equally long: (K - 1) / (M + K - 1)

"gpipe" runs all forwards, then all backwards (Huang et al., "GPipe", NeurIPS 2019). "1f1b" alternates them once
the pipeline is full, so that at most K microbatches are held instead of M; the bubble is the same (Narayanan et
al., "PipeDream", SOSP 2019; "Efficient Large-Scale Language Model Training", SC 2021, section 2.2). Both add the
microbatches' gradients in the same order, so they make the same bits.
"""

from __future__ import annotations

from typing import ClassVar

from mpitrain.errors import UsageError
from mpitrain.strategies.model_parallel.base import Split
from mpitrain.values import nearest, register

SCHEDULES = ("1f1b", "gpipe")
TOGETHER = ("replicas", "stages")


@register("strategy", "pipeline")
class Pipeline(Split):
    """The layers are split over `stages` ranks; the other ranks are further pipelines, and gradients are averaged.

    Huang et al., "GPipe", NeurIPS 2019; Narayanan et al., SC 2021.

    Args:
        stages: ranks of one pipeline, K.
        microbatches: pieces of a batch that are under way together, M; divides the job's batch size.
        schedule: "1f1b" or "gpipe".
        together: what sits on one node where it fits. "replicas" of a stage exchange two bytes of gradient for each
            byte of parameters and step, which is usually more than activations are; "stages" is for small
            layers with large activations.
    """

    has_stages: ClassVar[bool] = True

    stages: int = 2
    microbatches: int = 4
    schedule: str = "1f1b"
    together: str = "replicas"

    def check(self) -> None:
        self.hold("stages", self.stages >= 1, "must be at least 1")
        self.hold("microbatches", self.microbatches >= 1, "must be at least 1")
        for key, choices in (("schedule", SCHEDULES), ("together", TOGETHER)):
            value = getattr(self, key)
            if value not in choices:
                raise UsageError(f"pipeline: {key}={value!r}{nearest(value, list(choices))}")
        if self.schedule == "1f1b" and self.microbatches < self.stages:
            raise UsageError(
                f'pipeline: schedule="1f1b" over {self.stages} stages needs microbatches of at least {self.stages}, '
                f'got {self.microbatches}; give more, or schedule="gpipe"'
            )

    @property
    def bubble(self) -> float:
        """Idle share of every rank where stages take equally long and messages no time."""
        return (self.stages - 1) / (self.microbatches + self.stages - 1)

    def num_parts(self, num_ranks: int) -> int:
        return self.stages

    def sits_together(self) -> str:
        return "parts" if self.together == "stages" else "replicas"

    def check_batch(self, batch_size: int) -> None:
        if batch_size % self.microbatches:
            raise UsageError(
                f"{self}: a batch of {batch_size} samples cannot be cut into {self.microbatches} equal "
                f"microbatches; choose microbatches= that divides --batch-size"
            )
