"""Lightning's Trainer under strategies of this package: clipping, accumulation, a scheduler, validation, logging, a
checkpoint at every epoch, and data that Lightning divides."""

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import optim
from torch.utils.data import DataLoader

from mpitrain.frameworks.lightning import MPIStrategy
from tests.clients.programs import plugged


class Net(LightningModule):
    def __init__(self, run):
        super().__init__()
        self.net, self.record = plugged.build_model(), plugged.Record(run)

    def training_step(self, batch, index):
        inputs, wanted, numbers = batch
        self.record.saw(numbers)
        loss = plugged.mean_loss(self.net, inputs, wanted)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, index):
        self.log("measured", plugged.mean_loss(self.net, *batch[:2]), sync_dist=True)
        self.log("one", 1.0 / (plugged.STEPS * plugged.PARTS), sync_dist=True, reduce_fx="sum")

    def on_before_zero_grad(self, optimizer):
        self.rate = optimizer.param_groups[0]["lr"]

    def configure_optimizers(self):
        optimizer = plugged.build_optimizer(self.parameters())
        schedule = optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Steps(Callback):
    """Tells the record of each step."""

    def __init__(self):
        self.steps = None

    def on_train_batch_end(self, trainer, net, outputs, batch, index):
        if self.steps is not None and trainer.global_step > self.steps:
            net.record.stepped(net.rate)
        self.steps = trainer.global_step

    def on_train_start(self, trainer, net):
        self.steps = trainer.global_step


for run in plugged.runs():
    plain = DDPStrategy(process_group_backend="mpi4py")
    strategy = plain if run.get("plain") else MPIStrategy(run["strategy"])
    data = plugged.Data(plugged.workers_of(run))
    callbacks = [Steps()]
    if "save" in run:
        callbacks.append(ModelCheckpoint(dirpath=run["save"], filename="{epoch}", save_top_k=-1))
    trainer = Trainer(
        accelerator="cpu",
        devices=2 if run.get("plain") else 1,
        strategy=strategy,
        max_epochs=plugged.EPOCHS,
        accumulate_grad_batches=plugged.PARTS,
        gradient_clip_val=plugged.CLIP,
        callbacks=callbacks,
        enable_checkpointing="save" in run,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    net = Net(run)
    resume = f"{run['resume']}/epoch=0.ckpt" if "resume" in run else None
    loader = DataLoader(data, plugged.BATCH, shuffle=False)
    trainer.fit(net, loader, loader, ckpt_path=resume)
    measured = {name: value.item() for name, value in trainer.callback_metrics.items()}
    if "save" in run:
        trainer.save_checkpoint(f"{run['save']}/final.ckpt")
    net.record.show(run, net.net, trainer.global_rank, trainer.world_size, measured=measured)
