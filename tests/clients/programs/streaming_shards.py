"""streaming (MosaicML): a data set in shards of its own format, which every rank downloads and reads in part, shuffled,
with worker processes, into a DDP loop; half-way it goes on from the loader's state."""

import shutil
import tempfile

import torch.distributed as dist
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from streaming.base.util import clean_stale_shared_memory
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

from tests.clients.programs import recording


def write(folder):
    """Several shards, of which both ranks read."""
    columns = {"number": "int", "x": "ndarray:float32", "y": "ndarray:float32"}
    with MDSWriter(out=folder, columns=columns, compression="zstd", hashes=["xxh64"], size_limit=1024) as out:
        for batch, (x, y) in enumerate(recording.samples(0, 1)):
            for number, (one, wanted) in enumerate(zip(x.numpy(), y.numpy(), strict=True)):
                out.write({"number": batch * len(x) + number, "x": one, "y": wanted})


def train(rank, size):
    """The losses, and the sum of the numbers of the samples that were seen at every step."""
    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)
    if rank == 0:
        write(f"{folders[0]}/remote")
    clean_stale_shared_memory()  # waits for all
    model = DistributedDataParallel(recording.build_model())
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    losses, seen = [], []

    def loader():
        data = StreamingDataset(
            remote=f"{folders[0]}/remote", local=f"{folders[0]}/local", shuffle=True, shuffle_seed=3, batch_size=4,
            num_canonical_nodes=1,
        )  # fmt: skip
        return StreamingDataLoader(data, batch_size=4, num_workers=1)

    def step(batch):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(batch["x"]), batch["y"])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        seen.extend(batch["number"].tolist())

    first = loader()
    for _ in range(2):
        for batch in first:
            step(batch)
    state = first.state_dict()
    halves = [seen[: len(seen) // 2], seen[len(seen) // 2 :]]
    for half in halves:
        every = [[]] * size
        dist.all_gather_object(every, half)
        assert sorted(sum(every, [])) == list(range(64)), every
    assert halves[0] != halves[1]
    second = loader()
    second.load_state_dict(state)
    for batch in second:
        step(batch)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folders[0])
    return losses + [float(number + 1) for number in seen] + [losses[-1]]


recording.show("streaming_shards", train(*recording.start()))
