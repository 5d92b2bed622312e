"""The job of `signals.py` for longer, with checkpoints that take ten seconds to write, as to a busy file system."""

import dataclasses
import os
import time

import signal_job

from mpitrain.checkpoint import background_writer

WRITE_S = float(os.environ.get("WRITE_S", "10"))
_write_part = background_writer.write_part


def write_slowly(*arguments, **options):
    """What the writer's thread calls for each part."""
    time.sleep(WRITE_S)
    return _write_part(*arguments, **options)


background_writer.write_part = write_slowly
job = dataclasses.replace(signal_job.job, epochs=100000, checkpoint_every="25s", validate=None)
