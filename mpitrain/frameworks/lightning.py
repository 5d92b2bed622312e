"""A strategy for Lightning's Trainer: `Trainer(strategy=MPIStrategy("async(servers=1)"))`, with `mt.wrap` underneath.

All ranks that MPI has started run the script. Workers are Lightning's ranks; a server serves inside `fit` and leaves
the process when training ends.

Invariants: Lightning is imported by whoever imports this file. Its loops, clipping, logging and checkpoints are its
own: this file tells them who the ranks are, carries what they exchange, and puts what a strategy keeps beside each
checkpoint (`wrapping/beside.py`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mpitrain.errors import UsageError
from mpitrain.strategies.base import Strategy
from mpitrain.strategies.features import LOOP, why_not
from mpitrain.wrapping import beside, loop
from mpitrain.wrapping.exchange import no_sync
from mpitrain.wrapping.membership import Membership, join

if not (importlib.util.find_spec("lightning") or importlib.util.find_spec("pytorch_lightning")):
    raise ImportError("mpitrain.frameworks.lightning needs Lightning: pip install 'mpitrain[lightning]'")
if "lightning.pytorch" not in sys.modules and (  # its earlier name, where that is what the script uses
    "pytorch_lightning" in sys.modules or importlib.util.find_spec("lightning") is None
):
    from lightning_fabric.plugins import ClusterEnvironment
    from pytorch_lightning.strategies import ParallelStrategy
    from pytorch_lightning.utilities.exceptions import SIGTERMException
    from pytorch_lightning.utilities.rank_zero import rank_zero_only
else:
    from lightning.fabric.plugins import ClusterEnvironment
    from lightning.pytorch.strategies import ParallelStrategy
    from lightning.pytorch.utilities.exceptions import SIGTERMException
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

KEY, SUFFIX = "mpitrain", ".mpitrain"


class _Ranks(ClusterEnvironment):
    """Who is who, for Lightning: workers are its ranks."""

    main_address, main_port = "127.0.0.1", 0  # where nobody meets: MPI has brought the ranks together
    creates_processes_externally = True

    def __init__(self, member: Membership):
        self.member = member

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self.member.num_workers

    def global_rank(self) -> int:
        return self.member.index

    def local_rank(self) -> int:
        return self.member.local_index

    def node_rank(self) -> int:
        return self.member.node

    def set_world_size(self, size: int) -> None:
        """MPI has said it."""

    def set_global_rank(self, rank: int) -> None:
        """MPI has said it."""


class MPIStrategy(ParallelStrategy):
    """Trains with a strategy of this package, among the ranks that `mpitrain launch`, `mpirun` or `srun` has started.

    Args:
        strategy: such as `"async(servers=1)"` or `mt.Async(servers=1)`.
        watchdog_s, find_unused_parameters: as of `mt.wrap`.
        options: of Lightning's own `ParallelStrategy`.
    """

    def __init__(
        self,
        strategy: Strategy | str = "allreduce()",
        *,
        watchdog_s: float = 1800.0,
        find_unused_parameters: bool | None = None,
        **options: Any,
    ):
        self.member = join(strategy)
        super().__init__(cluster_environment=_Ranks(self.member), **options)
        self._wrap_options: dict[str, Any] = {
            "watchdog_s": watchdog_s,
            "find_unused_parameters": find_unused_parameters,
        }
        self._loaded: tuple[Path, Mapping[str, Any]] | None = None
        self._failed = False

    # ---- who the ranks are

    def set_world_ranks(self) -> None:
        """Have Lightning print and log on the first worker alone."""
        rank_zero_only.rank = self.global_rank

    @property
    def is_distributed(self) -> bool:
        """Whether a `DistributedSampler` is to divide the data; one worker reads all in the order of a serial run."""
        return self.member.num_workers > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """A server, which reads nothing when it trains, has some worker's part where its script measures."""
        workers = self.member.num_workers
        return {"num_replicas": workers, "rank": self.member.index % workers}

    @property
    def root_device(self) -> torch.device:
        devices: list[torch.device] = self.parallel_devices or [torch.device("cpu")]
        return devices[int(self.local_rank) % len(devices)]

    def model_to_device(self) -> None:
        self.model.to(self.root_device)

    # ---- what workers exchange; servers are in no group

    def barrier(self, name: str | None = None) -> None:
        if not self.member.serves:
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if self.member.serves:
            return obj
        brought = [obj]
        dist.broadcast_object_list(brought, src)
        return brought[0]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if self.member.serves or not isinstance(tensor, torch.Tensor):
            return tensor
        name = reduce_op.lower() if isinstance(reduce_op, str) else None
        takes_mean = name in ("mean", "avg") or reduce_op == dist.ReduceOp.AVG or reduce_op is None
        op = dist.ReduceOp.SUM if takes_mean else getattr(dist.ReduceOp, name.upper()) if name else reduce_op
        summed = tensor.detach().clone() if not takes_mean or tensor.is_floating_point() else tensor.float()
        dist.all_reduce(summed, op=op, group=group)
        return summed / dist.get_world_size(group) if takes_mean else summed

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        if self.member.serves:
            return tensor[None]
        gathered: torch.Tensor = super().all_gather(tensor, group, sync_grads)
        return gathered

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        with no_sync(self.lightning_module):
            yield

    # ---- one training

    def setup(self, trainer: Any) -> None:
        self._failed = False
        loaded, self._loaded = self._loaded, None
        fits = str(trainer.state.fn.value) == "fit"
        if fits:
            beside.begin_anew()
            self._apply_layer_sync()
        super().setup(trainer)
        if fits:
            self._wrap(trainer, loaded)
        elif not self.member.serves:
            module = self.lightning_module
            for held in (*module.parameters(), *module.buffers()):
                dist.broadcast(held.detach(), 0)

    def _apply_layer_sync(self) -> None:
        if self._layer_sync is None:
            return
        if why := why_not("sync_batchnorm", self.member.strategy, LOOP):
            raise UsageError(f"Trainer(sync_batchnorm=True), {self.member.strategy}: {why}")
        synchronised: Any = self._layer_sync.apply(self.lightning_module)
        self.model = synchronised

    def _wrap(self, trainer: Any, loaded: tuple[Path, Mapping[str, Any]] | None) -> None:
        if len(self.optimizers) != 1:
            raise UsageError(
                f"{self.member.strategy}: configure_optimizers returns {len(self.optimizers)} optimizers, and "
                "MPIStrategy trains with one, which may have several groups"
            )
        resume = None
        if loaded is not None and KEY in loaded[1]:
            path, held = loaded
            resume = beside.find_beside(Path(f"{path}{SUFFIX}"), held[KEY]["folder"], path)
        elif loaded is not None and loaded[1].get("optimizer_states"):
            self.load_optimizer_state_dict(loaded[1])  # another strategy's, which `wrap` takes along
        if self.member.serves:
            trainer.callbacks = []  # the end of this process is no exception that they would want to hear of
        elif not self.member.strategy.all_reduces:
            _end_each_by_itself(trainer)
        loop.wrap(self.model, self.optimizers[0], self.member.strategy, resume, **self._wrap_options)

    def on_train_end(self) -> None:
        """All workers hold the final model; servers leave."""
        loop.finish()

    def on_exception(self, exception: BaseException) -> None:
        self._failed = True

    def teardown(self) -> None:
        if not self._failed and loop._wrapped is not None:
            loop.finish()
        super().teardown()

    # ---- checkpoints

    @property
    def lightning_restore_optimizer(self) -> bool:
        """False: `mt.wrap` restores it."""
        return False

    def load_checkpoint(self, checkpoint_path: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
        loaded: dict[str, Any] = super().load_checkpoint(checkpoint_path, *arguments, **options)
        self._loaded = Path(checkpoint_path), loaded
        return loaded

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self.member.serves:
            return
        if "://" in str(filepath):
            raise UsageError(
                f"{filepath}: what {self.member.strategy} keeps is written beside a checkpoint, which needs a path of "
                "a file system that all ranks see"
            )
        folder, step = Path(f"{filepath}{SUFFIX}"), int(checkpoint["global_step"])
        whole = "optimizer_states" in checkpoint and loop._wrapped is not None
        name = beside.save_beside(folder, step) if whole else ""
        if whole and step:
            checkpoint[KEY] = {"folder": name, "strategy": str(self.member.strategy)}
        self.barrier()
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self.is_global_zero:
            beside.keep_only(folder, name)

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            beside.keep_only(Path(f"{filepath}{SUFFIX}"), "")


def _end_each_by_itself(trainer: Any) -> None:
    """Have Lightning's loop not ask the first worker at each batch whether it was told to end: workers that need not
    wait for one another would."""

    def look() -> None:
        if getattr(trainer, "received_sigterm", False):
            raise SIGTERMException

    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = look
