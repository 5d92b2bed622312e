"""What the runs of `programs/plugged.py` must come to, by plain torch in one process: each takes what the workers saw
at every step and returns the final parameters."""

import torch

from tests.clients.programs import plugged


class Model:
    """One worker's, or the servers'."""

    def __init__(self, workers):
        self.net, self.data = plugged.build_model(), plugged.Data(workers)
        self.optimizer = plugged.build_optimizer(self.net.parameters())

    def gradient(self, row, clip=True):
        """Of one step's micro-batches."""
        self.net.zero_grad()
        for numbers in row["samples"]:
            inputs, wanted = self.data.inputs[numbers], self.data.wanted[numbers]
            (plugged.mean_loss(self.net, inputs, wanted) / len(row["samples"])).backward()
        return self._clipped() if clip else self._held()

    def step(self, gradients, rate, clip=False):
        """With the mean of these."""
        for parameter, *parts in zip(self.net.parameters(), *gradients):
            parameter.grad = sum(parts) / len(parts)
        if clip:
            self._clipped()
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()

    def load(self, values):
        with torch.no_grad():
            for parameter, value in zip(self.net.parameters(), values):
                parameter.copy_(value)

    def values(self):
        return [parameter.detach().clone() for parameter in self.net.parameters()]

    def final(self):
        return torch.cat([value.flatten() for value in self.values()]).tolist()

    def _clipped(self):
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), plugged.CLIP)
        return self._held()

    def _held(self):
        return [parameter.grad.clone() for parameter in self.net.parameters()]


def averaged(workers):
    """`allreduce()`: the mean of the gradients is clipped. With one worker this is the serial run."""
    model = Model(len(workers))
    for rows in zip(*workers, strict=True):
        model.step([model.gradient(row, clip=False) for row in rows], rows[0]["rate"], clip=True)
    return model.final()


def clipped_by_worker(workers):
    """`sync()`: each worker clips its own gradient, and the servers step with their mean."""
    model = Model(len(workers))
    for rows in zip(*workers, strict=True):
        model.step([model.gradient(row) for row in rows], rows[0]["rate"])
    return model.final()


def averaged_now_and_then(workers, period=2):
    """`localsgd(period=2)`: the parameters are averaged after every second step and at the end."""
    models = [Model(len(workers)) for _ in workers]
    for number, rows in enumerate(zip(*workers, strict=True), start=1):
        for model, row in zip(models, rows, strict=True):
            model.step([model.gradient(row)], row["rate"])
        if number % period == 0 or number == len(workers[0]):
            mean = [sum(parts) / len(parts) for parts in zip(*(model.values() for model in models))]
            for model in models:
                model.load(mean)
    return models[0].final()


def replayed(workers):
    """`async()`: in the order in which the server took the pushes, each gradient on the version that its worker had
    read, since when a checkpoint may have brought a newer one. A push is answered with the version that it has made."""
    model = Model(len(workers))
    pushes = sorted(
        (row["version"], number, k) for number, rows in enumerate(workers) for k, row in enumerate(rows)
    )
    assert [version for version, *_ in pushes] == list(range(1, len(pushes) + 1))
    versions = {0: model.values()}
    for version, number, k in pushes:
        row = workers[number][k]
        model.load(versions[row["began"]])
        gradient = model.gradient(row)
        model.load(versions[version - 1])
        model.step([gradient], row["rate"])
        versions[version] = model.values()
    return model.final()
