"""Models that were split, gone on from with other splits. Arguments: a folder, and where the checkpoints are."""

import sys

import mpitrain as mt
from mpitrain.errors import AgreedError
from tests.mpi import splits

job = splits.changed(splits.deep_job(), checkpoint_every="never")
for strategy, path in (
    (mt.Pipeline(microbatches=3), "fewer"),
    (mt.Sharded(), "other"),
    (mt.AllReduce(), "whole"),
):
    try:
        mt.train(job, strategy, run_dir=sys.argv[1] + "/" + path, quiet=True, resume=sys.argv[2])
    except AgreedError as error:
        print(error, flush=True)
