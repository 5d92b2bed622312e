"""From a batch to a gradient: the loss, its precision, batches that are added up, clipping."""
