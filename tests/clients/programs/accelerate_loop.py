"""A loop of one's own under Hugging Face's Accelerate, which accumulates gradients and gathers the losses."""

from accelerate import Accelerator
from torch import nn, optim

from tests.clients.programs import recording

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
recording.keep_group()
assert accelerator.num_processes == 2
model = recording.build_model()
model, optimizer = accelerator.prepare(model, optim.SGD(model.parameters(), lr=0.05))
losses = []
for x, y in recording.samples(accelerator.process_index, accelerator.num_processes):
    with accelerator.accumulate(model):
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    losses.append(accelerator.gather_for_metrics(loss.detach()).mean().item())
recording.show("accelerate_loop", losses)
