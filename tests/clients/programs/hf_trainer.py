"""Hugging Face's Trainer, which divides the data itself and logs a mean over the ranks at every step."""

import sys
import tempfile

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from tests.clients.programs import recording


class Model(nn.Module):
    """The model of the other programs, with the arguments that the Trainer gives."""

    def __init__(self):
        super().__init__()
        self.model = recording.build_model()

    def forward(self, inputs=None, labels=None):
        output = self.model(inputs)
        return {"loss": nn.functional.mse_loss(output, labels), "logits": output}


class Data(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """All ranks' samples."""

    def __init__(self):
        batches = recording.samples(0, 1)
        self.inputs, self.labels = (torch.cat([batch[k] for batch in batches]) for k in (0, 1))

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, k):
        return {"inputs": self.inputs[k], "labels": self.labels[k]}


arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    use_cpu=True,
    ddp_backend=sys.argv[1],
    per_device_train_batch_size=4,
    num_train_epochs=2,
    learning_rate=0.02,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
)
recording.keep_group()
trainer = Trainer(model=Model(), args=arguments, train_dataset=Data(), eval_dataset=Data())
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
recording.show("hf_trainer", [*losses, trainer.evaluate()["eval_loss"]])
