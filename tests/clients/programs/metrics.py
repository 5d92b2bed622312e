"""DDP whose mean error torchmetrics computes over all ranks at every step."""

from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

from tests.clients.programs.recording import build_model, samples, show, start


def train(rank, size):
    """The errors over all ranks."""
    from torchmetrics import CatMetric, MeanSquaredError

    model = DistributedDataParallel(build_model())
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    errors = []
    seen = CatMetric()  # as many entries as the rank's number says: gathered at different lengths
    for x, y in samples(rank, size):
        optimizer.zero_grad()
        output = model(x)
        error = MeanSquaredError()
        error.update(output.detach(), y)
        nn.functional.mse_loss(output, y).backward()
        optimizer.step()
        errors.append(error.compute().item())
        for _ in range(rank + 1):
            seen.update(y[0])
    assert len(seen.compute()) == len(errors) * sum(range(1, size + 1))
    return errors


if __name__ == "__main__":
    show("metrics", train(*start()))
