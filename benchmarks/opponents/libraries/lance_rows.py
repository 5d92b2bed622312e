"""Lance: a table with a column of fixed-size lists. `how`: rows taken by number in a shuffled order, so many batches at
once; or, where it is `ranges`, its own sampler's ranges of rows in a shuffled order, each mixed in itself."""

import lance
import pyarrow as pa
import torch
from epochs import Given, answer_epochs
from lance.sampler import ShardedBatchSampler
from lance.torch.data import LanceDataset

given = Given()
path, width = given.place("all.lance"), given.x.shape[1]
if not path.exists():
    x = pa.FixedSizeListArray.from_arrays(pa.array(given.x.reshape(-1)), width)
    lance.write_dataset(pa.table({"x": x, "y": pa.array(given.y)}), path)
dataset = lance.dataset(path)


def tensors(table):
    lists = table.column("x").combine_chunks()
    values = lists.flatten().to_numpy().reshape(-1, width)
    return torch.from_numpy(values), torch.from_numpy(table.column("y").to_numpy())


def taken(number):
    order = torch.randperm(len(given.y), generator=torch.Generator().manual_seed(number))
    for part in order.split(given.how * given.batch_size):
        x, y = tensors(dataset.take(part.numpy()))
        yield from given.cut(x, y, torch.arange(len(y)))


def ranges(number):
    sampler = ShardedBatchSampler(0, 1, randomize=True, seed=number)
    window = 4 * given.chunk
    for batch in LanceDataset(dataset, window, sampler=sampler, to_tensor_fn=lambda table, **_: table):
        x, y = tensors(pa.Table.from_batches([batch]))
        yield from given.cut(x, y, torch.randperm(len(y)))


answer_epochs(given, ranges if given.how == "ranges" else taken)
