"""A loop of one's own under Accelerate and strategies of this package: clipping, accumulation, a scheduler, gathered
losses, and a saved state after the first epoch."""

import accelerate
from torch import optim
from torch.utils.data import DataLoader

from mpitrain.frameworks.accelerate import Accelerator
from tests.clients.programs import plugged

for run in plugged.runs():
    parts = {"gradient_accumulation_steps": plugged.PARTS}
    plain, data = run.get("plain"), plugged.Data(plugged.workers_of(run))
    accelerator = (
        accelerate.Accelerator(cpu=True, **parts) if plain else Accelerator(run["strategy"], **parts)
    )
    model, record = plugged.build_model(), plugged.Record(run)
    optimizer = plugged.build_optimizer(model.parameters())
    schedule = optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, plugged.BATCH))
    accelerator.register_for_checkpointing(schedule)
    if "resume" in run:
        accelerator.load_state(run["resume"])
    for epoch in range(1 if "resume" in run else 0, plugged.EPOCHS):
        for inputs, wanted, numbers in loader:
            with accelerator.accumulate(model):
                record.saw(numbers)
                loss = plugged.mean_loss(model, inputs, wanted)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), plugged.CLIP)
                rate = optimizer.param_groups[0]["lr"]
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                record.stepped(rate)
                schedule.step()
        if "save" in run and epoch == 0:
            accelerator.save_state(run["save"])
    gathered = accelerator.gather(loss.detach()[None]).tolist()
    accelerator.end_training()
    record.show(
        run, accelerator.unwrap_model(model), accelerator.process_index, accelerator.num_processes,
        measured={"one": float(len(gathered))},
    )  # fmt: skip
