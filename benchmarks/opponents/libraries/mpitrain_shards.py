"""Our reader: shards as `mpitrain data pack` writes them, with checksums."""

import h5py
from epochs import Given, answer_epochs

import mpitrain as mt

given = Given()
path = given.place("all.h5")
if not path.exists():
    with h5py.File(path, "w") as file:
        for name, array in {"x": given.x, "y": given.y}.items():
            file.create_dataset(name, data=array, chunks=(given.chunk, *array.shape[1:]), fletcher32=True)
batches = mt.Shards(str(path)).batches(given.batch_size)


def epoch(number):
    batches.set_epoch(number)
    return ((batch["x"], batch["y"]) for batch in batches)


answer_epochs(given, epoch)
