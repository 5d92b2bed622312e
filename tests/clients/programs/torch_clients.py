"""The programs that need nothing but torch and torchmetrics, one after the other in one launch."""

from tests.clients.programs import async_checkpoint, post_localsgd, recording, zero_optimizer

rank, size = recording.start()
recording.show("zero_optimizer", zero_optimizer.train(rank, size))
recording.show("post_localsgd", post_localsgd.train(rank, size))
recording.show("async_checkpoint", async_checkpoint.train(rank, size))
try:
    import torchmetrics  # noqa: F401
except ImportError:
    pass
else:
    from tests.clients.programs import metrics

    recording.show("metrics", metrics.train(rank, size))
