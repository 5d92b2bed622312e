"""Opacus: private training whose clipped gradients its own DDP adds up, with noise of rank 0 on all."""

import warnings

import torch
from torch import optim

from tests.clients.programs.recording import build_model, samples, show, start, steps


def train(rank, size):
    """The loss of every step."""
    from opacus import PrivacyEngine
    from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as PrivateDdp

    warnings.filterwarnings("ignore")
    batches = list(samples(rank, size))
    data = torch.utils.data.TensorDataset(*(torch.cat(part) for part in zip(*batches, strict=True)))
    model = PrivateDdp(build_model())
    torch.manual_seed(7)
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model, optimizer=optim.SGD(model.parameters(), lr=0.05), noise_multiplier=0.5, max_grad_norm=1.0,
        data_loader=torch.utils.data.DataLoader(data, batch_size=len(batches[0][0])), poisson_sampling=False,
    )  # fmt: skip
    return steps(model, optimizer, loader)


if __name__ == "__main__":
    show("opacus_ddp", train(*start()))
