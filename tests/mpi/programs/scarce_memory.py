"""A model that does not fit: `scarce_memory.py DIRECTORY STRATEGY...`; each rank may use a third of what the whole
needs beyond its size before the model is built. What is imported at first use is not counted: a small model has been
trained before. Rank r writes `sizes-r.json`: by strategy, the size before and the limit.
"""

import dataclasses
import json
import resource
import sys
from functools import partial
from pathlib import Path

import mpitrain as mt
from mpitrain.mpi.runtime import start
from mpitrain.strategies.base import Strategy
from mpitrain.values import parse
from tests import scarce

runtime = start()
root, sizes, size = Path(sys.argv[1]), {}, [0, 0]


def limited():
    size[0] = scarce.size()
    size[1] = size[0] + scarce.NEEDED_BYTES // 3
    resource.setrlimit(resource.RLIMIT_DATA, (size[1], resource.RLIM_INFINITY))
    return scarce.model()


for text in sys.argv[2:]:
    strategy = parse(text, "strategy")
    assert isinstance(strategy, Strategy)
    batch_size = scarce.BATCH // strategy.num_replicas(runtime.size) if text != "allreduce()" else 8
    job = dataclasses.replace(scarce.job, batch_size=batch_size, checkpoint_every=str(scarce.BATCH))
    name = text.partition("(")[0]
    small = dataclasses.replace(job, model=partial(scarce.model, width=16))
    mt.train(
        dataclasses.replace(small, data=scarce.data(16)),
        strategy,
        run_dir=str(root / f"{name}-small"),
        quiet=True,
    )
    try:
        for steps in (1, 2):
            resume = "auto" if steps == 2 else None
            mt.train(
                dataclasses.replace(job, model=limited), strategy, run_dir=str(root / name), quiet=True, steps=steps,
                resume=resume,
            )  # fmt: skip
            sizes.setdefault(name, []).append(size[:])
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
(root / f"sizes-{runtime.rank}.json").write_text(json.dumps(sizes))
