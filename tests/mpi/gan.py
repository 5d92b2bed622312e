"""A small GAN in float64 whose noise is part of the data, so that what one process makes of a batch is what several
make of its shares."""

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from mpitrain.model.recipe import seed_step
from tests import toy

BATCH, SAMPLES, EPOCHS = 12, 31, 2


def networks():
    """Tanh and a batch-free normalization: no sample looks at another one."""
    generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    discriminator = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 1))
    return nn.ModuleDict({"generator": generator, "discriminator": discriminator}).double()


def real_of(batch):
    return batch["x"][:, 3:].double()


def noise_of(batch):
    return batch["x"][:, :3].double()


def judged(logits, real):
    return binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))


def step(model, optimizers, batch):
    """As in torch's tutorial: two backward passes for the discriminator, then one through it for the generator."""
    generator, discriminator = model["generator"], model["discriminator"]
    fake = generator(noise_of(batch))
    optimizers["discriminator"].zero_grad()
    real_loss = judged(discriminator(real_of(batch)), True)
    real_loss.backward()
    fake_loss = judged(discriminator(fake.detach()), False)
    fake_loss.backward()
    optimizers["discriminator"].step()
    optimizers["generator"].zero_grad()
    loss = judged(discriminator(fake), True)
    loss.backward()
    optimizers["generator"].step()
    return {"generator": loss, "discriminator": real_loss + fake_loss}


OPTIMIZERS = {
    "generator": lambda parameters: torch.optim.Adam(parameters, lr=0.01, betas=(0.5, 0.999)),
    "discriminator": lambda named_parameters: torch.optim.SGD(
        [one for _, one in named_parameters], lr=0.05, momentum=0.9
    ),
}
DATA = toy.Memory(SAMPLES)


def make_job(**changes):
    return toy.make_job(
        **{
            "model": networks,
            "loss": None,
            "optimizer": OPTIMIZERS,
            "step": step,
            "data": DATA,
            "epochs": EPOCHS,
            "batch_size": BATCH,
        }
        | changes
    )


def serial(clip_norm=None):
    """torch's own loop in one process, with the batches of all."""
    torch.manual_seed(0)
    model = networks()
    optimizers = {
        "generator": OPTIMIZERS["generator"](model["generator"].parameters()),
        "discriminator": OPTIMIZERS["discriminator"](model["discriminator"].named_parameters()),
    }
    for name, optimizer in optimizers.items():
        parameters = list(model[name].parameters())
        if clip_norm is not None:
            optimizer.register_step_pre_hook(
                lambda *_, clipped=parameters: nn.utils.clip_grad_norm_(clipped, clip_norm) and None
            )
    reader, number = DATA.reader(None, 0), 0
    for epoch in range(EPOCHS):
        for start in range(0, SAMPLES, BATCH):
            seed_step(0, 0, number)
            for optimizer in optimizers.values():
                optimizer.zero_grad()
            step(model, optimizers, reader.batch(epoch, start, min(BATCH, SAMPLES - start)))
            number += 1
    return model.state_dict()
