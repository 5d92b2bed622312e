"""Lightning's Trainer with its strategy for DDP, which validates and logs over all ranks."""

import sys

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import nn, optim
from torch.utils.data import DataLoader

from tests.clients.programs import recording


class Model(LightningModule):
    """The model of the other programs."""

    def __init__(self):
        super().__init__()
        self.model = recording.build_model()
        self.losses = []

    def on_fit_start(self):
        recording.keep_group()

    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.mse_loss(self.model(x), y)
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        self.log("seen", nn.functional.mse_loss(self.model(x), y), sync_dist=True)

    def on_train_end(self):
        self.losses.append(self.trainer.callback_metrics["seen"].item())
        recording.show("lightning_trainer", self.losses)

    def configure_optimizers(self):
        return optim.SGD(self.parameters(), lr=0.05)


trainer = Trainer(
    accelerator="cpu",
    devices=2,
    strategy=DDPStrategy(process_group_backend=sys.argv[1]),
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    use_distributed_sampler=False,
)
batches = DataLoader(recording.samples(trainer.global_rank, 2), batch_size=None)
trainer.fit(Model(), batches, batches)
