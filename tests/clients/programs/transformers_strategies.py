"""Hugging Face's Trainer under strategies of this package: clipping, accumulation, its own decay of the rate, a
checkpoint at every epoch and a measurement at the end."""

import tempfile
from typing import Any

import torch
import transformers
from torch import nn

from mpitrain.frameworks.transformers import Trainer, TrainingArguments
from tests.clients.programs import plugged


class Net(nn.Module):
    """With the arguments that the Trainer gives."""

    def __init__(self, run):
        super().__init__()
        self.net, self.record = plugged.build_model(), plugged.Record(run)

    def forward(self, inputs=None, labels=None, numbers=None):
        if self.training:
            self.record.saw(numbers)
        return {"loss": plugged.mean_loss(self.net, inputs, labels), "logits": labels}


class Named(torch.utils.data.Dataset[Any]):
    """Samples by name."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, number):
        return dict(zip(("inputs", "labels", "numbers"), self.data[number]))


class Steps(transformers.TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **more):
        self.rate = optimizer.param_groups[0]["lr"]

    def on_step_end(self, args, state, control, model=None, **more):
        model.record.stepped(self.rate)


for run in plugged.runs():
    plain, data = run.get("plain"), Named(plugged.Data(plugged.workers_of(run)))
    given = {} if plain else {"mpi_strategy": run["strategy"]}
    arguments = (transformers.TrainingArguments if plain else TrainingArguments)(
        output_dir=run.get("save", tempfile.mkdtemp()),
        use_cpu=True,
        per_device_train_batch_size=plugged.BATCH,
        gradient_accumulation_steps=plugged.PARTS,
        max_grad_norm=plugged.CLIP,
        num_train_epochs=plugged.EPOCHS,
        learning_rate=0.2,
        train_sampling_strategy="sequential",
        save_strategy="epoch" if "save" in run else "no",
        logging_steps=2,
        report_to=[],
        disable_tqdm=True,
        **given,
    )
    net = Net(run)
    optimizer = plugged.build_optimizer(net.parameters())
    trainer = (transformers.Trainer if plain else Trainer)(
        model=net,
        args=arguments,
        train_dataset=data,
        eval_dataset=data,
        optimizers=(optimizer, None),
        callbacks=[Steps()],
    )
    trainer.train(
        resume_from_checkpoint=f"{run['resume']}/checkpoint-{plugged.STEPS}" if "resume" in run else None
    )
    measured = {"measured": trainer.evaluate()["eval_loss"]}
    net.record.show(run, net.net, arguments.process_index, arguments.world_size, measured=measured)
