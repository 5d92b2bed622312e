"""Hugging Face's `Trainer` and `TrainingArguments`, which take a strategy: `TrainingArguments(mpi_strategy=
"async(servers=1)", ...)`, with `mt.wrap` underneath.

All ranks that MPI has started run the script. Workers are the Trainer's processes; a server serves inside `train` and
leaves the process when training ends.

Invariants: transformers is imported by whoever imports this file. The Trainer is its own, with the Accelerator of
`accelerate.py`; the two methods for the state of the optimizer also write and find what the strategy keeps.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpitrain.errors import UsageError
from mpitrain.wrapping.membership import join, joined

try:
    import transformers

    from mpitrain.frameworks.accelerate import Accelerator, as_accelerate_sees
except ImportError as error:
    raise ImportError(
        "mpitrain.frameworks.transformers needs Transformers and Accelerate: pip install 'mpitrain[transformers]'"
    ) from error


@dataclasses.dataclass
class TrainingArguments(transformers.TrainingArguments):
    """As Hugging Face's.

    Args:
        mpi_strategy: such as `"async(servers=1)"`; mpi_watchdog_s: as `watchdog_s` of `mt.wrap`.
    """

    mpi_strategy: str = dataclasses.field(
        default="allreduce()", metadata={"help": "A strategy of mpitrain, such as 'async(servers=1)'."}
    )
    mpi_watchdog_s: float = dataclasses.field(
        default=1800.0, metadata={"help": "End the job when a rank stands still for so long; 0 is never."}
    )

    def __post_init__(self) -> None:
        member = join(self.mpi_strategy)
        if not member.strategy.all_reduces:
            self.average_tokens_across_devices = False  # all workers would wait for one another at each step
        arguments: Any = self
        with as_accelerate_sees(member, arguments.use_cpu) as arguments.use_cpu:
            super().__post_init__()
        if member.serves:
            arguments._n_gpu = min(1, arguments._n_gpu)  # or it would make a DataParallel of them

    @contextlib.contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """A server waits for nobody."""
        member = joined()
        if member is not None and member.serves:
            yield
            return
        with super().main_process_first(local, desc):
            yield


class Trainer(transformers.Trainer):
    """As Hugging Face's; `args` are the `TrainingArguments` of this file."""

    def create_accelerator_and_postprocess(self) -> None:
        """The Accelerator that the Trainer makes, as ours.

        Raises:
            UsageError: `args` are Hugging Face's own, or none.
        """
        if not isinstance(self.args, TrainingArguments):
            raise UsageError(
                "mpitrain's Trainer takes mpitrain's TrainingArguments, which say the strategy: Trainer(model, "
                'TrainingArguments(mpi_strategy="allreduce()", ...), ...)'
            )
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = Accelerator
        self.accelerator.take_part(
            join(self.args.mpi_strategy), watchdog_s=self.args.mpi_watchdog_s,
            find_unused_parameters=self.args.ddp_find_unused_parameters,
        )  # fmt: skip

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        self.accelerator.save_beside(Path(output_dir))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.accelerator.begin(self.accelerator.find(Path(checkpoint)))

    def _finalize_training(self, *arguments: Any) -> Any:
        """All workers hold the final model, before the best one may take its place; servers leave."""
        self.accelerator.finish()
        return super()._finalize_training(*arguments)
