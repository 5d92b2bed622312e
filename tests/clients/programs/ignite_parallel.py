"""ignite as its documentation shows it: `idist.Parallel` starts, `auto_model`, `auto_optim` and `auto_dataloader` adapt
to the group, metrics are of all ranks, and a checkpoint is kept of the best model."""

import logging
import os
import tempfile

import ignite.distributed as idist
import torch
from ignite.contrib.engines import common
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver, PiecewiseLinear
from ignite.metrics import Loss, MeanAbsoluteError, RootMeanSquaredError
from ignite.metrics.regression import MedianAbsoluteError
from torch import nn, optim

from tests.clients.programs import recording


def training(local_rank, losses):
    """Fill in the losses."""
    recording.keep_group()
    rank, size = idist.get_rank(), idist.get_world_size()
    assert size == 2 and local_rank == rank and idist.backend() == "gloo"
    batches = recording.samples(0, 1)
    data = torch.utils.data.TensorDataset(*(torch.cat(part) for part in zip(*batches, strict=True)))
    loader = idist.auto_dataloader(data, batch_size=8, shuffle=True)
    model = idist.auto_model(recording.build_model(), sync_bn=False)
    optimizer = idist.auto_optim(optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    trainer = create_supervised_trainer(model, optimizer, nn.MSELoss())
    schedule = PiecewiseLinear(optimizer, "lr", milestones_values=[(0, 0.0), (4, 0.05), (16, 0.01)])
    common.setup_common_training_handlers(
        trainer, train_sampler=loader.sampler, lr_scheduler=schedule, with_gpu_stats=False, with_pbars=False
    )
    metrics = {
        "loss": Loss(nn.MSELoss()),
        "mae": MeanAbsoluteError(),
        "rmse": RootMeanSquaredError(),
        "median": MedianAbsoluteError(),  # gathers
    }
    evaluator = create_supervised_evaluator(model, metrics=metrics)
    folder = idist.broadcast(tempfile.mkdtemp() if rank == 0 else None, safe_mode=True)
    with idist.one_rank_first(local=True):
        assert os.path.isdir(folder)
    best = Checkpoint(
        {"model": model, "optimizer": optimizer}, DiskSaver(folder, require_empty=False), n_saved=1,
        score_function=Checkpoint.get_default_score_fn("loss", -1.0),
        global_step_transform=lambda *_: trainer.state.epoch,
    )  # fmt: skip
    evaluator.add_event_handler(Events.COMPLETED, best)

    @trainer.on(Events.ITERATION_COMPLETED)
    def _(engine):
        losses.append(idist.all_reduce(engine.state.output))

    @trainer.on(Events.EPOCH_COMPLETED)
    def _(engine):
        losses.extend(evaluator.run(loader).metrics[name] for name in metrics)
        assert idist.all_gather(f"rank {rank}") == [f"rank {other}" for other in range(size)]

    trainer.run(loader, max_epochs=4)
    assert evaluator.state.metrics["loss"] < losses[0] / 4
    idist.barrier()
    kept = torch.load(best.last_checkpoint)["model"]
    losses.append(float(sum(value.abs().sum() for value in kept.values())))
    recording.put("ignite_parallel", losses, recording.carried_by())


logging.disable(logging.INFO)
with idist.Parallel(backend="gloo") as parallel:
    parallel.run(training, [])
