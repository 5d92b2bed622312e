"""MosaicML streaming: local shards of 64 MiB, its default order py1e, `how` worker processes."""

from epochs import Given, answer_epochs
from streaming import MDSWriter, StreamingDataset
from streaming.base.util import clean_stale_shared_memory
from torch.utils.data import DataLoader

given = Given()
path = given.place("mds")
if not path.exists():
    columns = {"x": f"ndarray:uint8:{given.x.shape[1]}", "y": "int64"}
    with MDSWriter(out=str(path), columns=columns) as out:
        for x, y in zip(given.x, given.y, strict=True):
            out.write({"x": x, "y": y})
clean_stale_shared_memory()
dataset = StreamingDataset(local=str(path), shuffle=True, batch_size=given.batch_size, num_canonical_nodes=1)


def epoch(number):
    return (
        (batch["x"], batch["y"]) for batch in DataLoader(dataset, given.batch_size, num_workers=given.how)
    )


answer_epochs(given, epoch, given.how)
