"""An `Accelerator` for Hugging Face's Accelerate: `Accelerator("async(servers=1)")`, with `mt.wrap` underneath.

All ranks that MPI has started run the script. Workers are Accelerate's processes; a server serves inside `prepare` and
leaves the process when training ends.

Invariants: accelerate is imported by whoever imports this file. Devices, precision, accumulation, data loaders,
clipping and gathering are its own; in place of DDP stands `mt.wrap`, and what a strategy keeps lies in the folder
`mpitrain` of each saved state (`wrapping/beside.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from mpitrain.devices import accelerator
from mpitrain.errors import UsageError
from mpitrain.strategies.base import Strategy
from mpitrain.wrapping import beside, loop
from mpitrain.wrapping.membership import Membership, join, joined
from mpitrain.wrapping.preparing import Preparing

try:
    import accelerate
    from accelerate.state import PartialState
except ImportError as error:
    raise ImportError(
        "mpitrain.frameworks.accelerate needs Accelerate: pip install 'mpitrain[accelerate]'"
    ) from error

# What says to Accelerate that there are other processes; a server is no process of its.
_LOOKED_AT = ("LOCAL_RANK", "WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
FOLDER, NAME_FILE = "mpitrain", "mpitrain.json"


@contextlib.contextmanager
def as_accelerate_sees(member: Membership, cpu: bool) -> Iterator[bool]:
    """Within it, Accelerate finds this process's place; what is yielded is its argument `cpu`."""
    if not member.serves:
        yield cpu or accelerator.kind() is None  # without a GPU it looks for ranks only if told so
        return
    hidden = {name: os.environ.pop(name) for name in _LOOKED_AT if name in os.environ}
    if not cpu and (kind := accelerator.kind()) is not None:
        os.environ["ACCELERATE_TORCH_DEVICE"] = str(accelerator.of_rank(kind, member.local_index))
    try:
        yield cpu
    finally:
        os.environ |= hidden
        state = PartialState()
        state.process_index, state.num_processes = member.index, member.num_workers
        state.local_process_index = member.local_index


class Accelerator(accelerate.Accelerator):
    """Trains with a strategy of this package, among the ranks that `mpitrain launch`, `mpirun` or `srun` has started.

    Args:
        strategy: such as `"async(servers=1)"` or `mt.Async(servers=1)`.
        watchdog_s, find_unused_parameters: as of `mt.wrap`.
        options: of `accelerate.Accelerator`.
    """

    def __init__(
        self,
        strategy: Strategy | str = "allreduce()",
        *,
        watchdog_s: float = 1800.0,
        find_unused_parameters: bool | None = None,
        **options: Any,
    ):
        if PartialState._shared_state and joined() is None:
            raise UsageError(
                "mpitrain's Accelerator: Accelerate has looked for ranks already, and not among workers alone: make "
                "this Accelerator before anything else of Accelerate's"
            )
        member = join(strategy)
        with as_accelerate_sees(member, bool(options.pop("cpu", False))) as cpu:
            super().__init__(**options, cpu=cpu)
        if find_unused_parameters is None and self.ddp_handler is not None:
            find_unused_parameters = self.ddp_handler.find_unused_parameters
        self.take_part(member, watchdog_s=watchdog_s, find_unused_parameters=find_unused_parameters)

    def take_part(self, member: Membership, **options: Any) -> None:
        """Be the Accelerator of this process; `options` of `mt.wrap`."""
        self.member, self._wrap_options = member, options
        self.preparing: Preparing | None = None

    def prepare_model(
        self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """On its device and with its precision, and in no DDP."""
        return super().prepare_model(model, device_placement, evaluation_mode=True)

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        prepared = super().prepare(*args, device_placement=device_placement)
        if len(self._optimizers) > 1:
            raise UsageError(
                f"{self.member.strategy}: {len(self._optimizers)} optimizers are prepared, and this Accelerator trains "
                "with one, which may have several groups"
            )
        optimizer = self._optimizers[0].optimizer if self._optimizers else None
        prepares = self.preparing is None or self.preparing.optimizer is not optimizer
        if optimizer is not None and prepares:
            trained = {id(one) for group in optimizer.param_groups for one in group["params"]}
            for model in self._models:  # others are teachers and the like
                if any(id(one) in trained for one in model.parameters()):
                    self.preparing = Preparing(self.member, model, optimizer, **self._wrap_options)
                    break
        return prepared

    @contextlib.contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        self.begin()
        with super().accumulate(*models):
            yield

    @contextlib.contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        self.begin()
        with super().no_sync(model):
            yield

    def begin(self, resume: Path | None = None) -> None:
        if self.preparing is not None:
            self.preparing.begin(resume)

    def end_training(self) -> None:
        """All workers hold the final model; servers leave."""
        self.finish()
        super().end_training()

    def finish(self) -> None:
        """`mt.finish`, also of a training without a step."""
        if self.preparing is not None:
            self.preparing.begin()  # servers wait for it
            loop.finish()

    # ---- checkpoints

    def get_state_dict(self, model: Any, unwrap: bool = True) -> dict[str, Any]:
        """Each tensor with memory of its own: parameters lie in one buffer under some strategies, and Accelerate takes
        what lies in one for one tensor and leaves it out."""
        state = super().get_state_dict(model, unwrap)
        return {name: one.clone() if isinstance(one, torch.Tensor) else one for name, one in state.items()}

    def save_state(self, output_dir: str | None = None, *arguments: Any, **options: Any) -> Any:
        place = super().save_state(output_dir, *arguments, **options)
        self.save_beside(Path(place))
        return place

    def load_state(self, input_dir: str | None = None, *arguments: Any, **options: Any) -> Any:
        place = Path(os.path.expanduser(input_dir)) if input_dir is not None else _newest(self.project_dir)
        resume = self.find(place)
        if self.preparing is not None and self.preparing.begun:
            self.begin(place)  # which says why not
        loaded = super().load_state(input_dir, *arguments, **options)
        self.begin(resume)
        return loaded

    def find(self, place: Path) -> Path | None:
        """What lies in the folder of a saved state for `mt.wrap(resume=)`; None where Accelerate's own files are all.

        Raises:
            UsageError: servers would not learn of what Accelerate loads on workers.
        """
        path, strategy = place / NAME_FILE, self.member.strategy
        record = json.loads(path.read_text()) if path.is_file() else {"step": 0}
        if record["step"]:
            return beside.find_beside(place / FOLDER, str(record["folder"]), place)
        if strategy.has_servers:
            raise UsageError(
                f"{place} was saved by no training under a strategy of mpitrain, and the servers of {strategy} would "
                "not learn of it: load its weights and the state of the optimizer on all ranks before they are prepared"
            )
        return None

    def save_beside(self, place: Path) -> None:
        """Write what the strategy keeps into this folder; collective over workers."""
        step = self.preparing.num_steps if self.preparing is not None else 0
        name = beside.save_beside(place / FOLDER, step) if step else ""
        self.wait_for_everyone()
        if self.is_main_process:
            record = {"folder": name, "step": step, "strategy": str(self.member.strategy)}
            (place / NAME_FILE).write_text(json.dumps(record) + "\n")
            beside.keep_only(place / FOLDER, name)


def _newest(project_dir: str | None) -> Path:
    """What `load_state()` without a folder goes on from, where Accelerate names the folders itself."""
    found = Path(project_dir or ".", "checkpoints").glob("checkpoint_*")
    return max(found, key=lambda folder: int(folder.name.rpartition("_")[2]), default=Path("."))
