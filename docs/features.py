"""What a job can ask for, under every strategy: the table of `docs/features.md`.

`tests/mpi/test_features.py` runs every cell (`make tables`), or a sample (`make test`): what works has to finish and,
where `changes_model`, to train another model than without the feature; what is refused has to say the words of its row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from docs.markdown import cell, table


class Row(NamedTuple):
    """Strategies under which a feature fares alike: `what` it acts on, or, where a job is refused, why; `said`: words
    of the refusal."""

    strategies: tuple[str, ...]
    what: str
    said: str = ""


class Feature(NamedTuple):
    """Fields of a `Job`, as the table names them and as the test sets them. `leaves`: a file in the run directory;
    `says`: what is true in `result.json`; `keeps_model`: the model is the same to the bit as without the feature;
    `measures`: a metric in `result.json`."""

    name: str
    fields: dict[str, Any]
    rows: tuple[Row, ...]
    changes_model: bool = True
    leaves: str = ""
    says: str = ""
    keeps_model: bool = False
    measures: str = ""


_MEAN = ("allreduce()", "sync()", "backup()", "pipeline(microbatches=2)", "tensor(parallel=2)", "sharded()")
_OWN = (
    "async()", "async(servers=2)", "softsync(updates=2)", "ssp(bound=3)", "bounded(staleness=2)", "elastic()",
    "localsgd(period=2)", "decentralized()",
)  # fmt: skip
_CODED = (
    "allreduce(codec=topk())", "allreduce(codec=float16())", 'sync(push_wire="float16")',
    "sync(servers=2, push_wire=topk())", "async(push_wire=topk())", "decentralized(codec=topk())",
)  # fmt: skip
_MOVING = ('sync(optimizer="worker")', 'sync(optimizer="worker", servers=2)', "sync(push_every=2)")
_CORRECTED = Row(
    ("sync(damping=gap_aware())",),
    "this damping changes gradients before their mean is clipped, and no gradient is stale here",
    "leave damping out",
)
_OWN_ROWS = (
    Row(_OWN, "each worker's own gradient, before it is pushed or stepped with"),
    Row(
        _CODED,
        "each worker's own gradient, before the codec: what is sent or kept back is of the clipped one",
    ),
    Row(_MOVING, "each worker's own gradient, before its own step"),
)

_ADDED = Row(
    (
        "allreduce()", "sync()", "sync(servers=2)", "backup()", "async()", "async(servers=2)", "softsync(updates=2)",
        "ssp(bound=3)", "bounded(staleness=2)", "elastic()", "localsgd(period=2)", "decentralized()",
        "tensor(parallel=2)", "sharded()", "allreduce(codec=topk())", "allreduce(codec=float16())",
        "sync(push_wire=topk())", 'sync(optimizer="worker")', "async(inflight=2)", "sync(batching=per_round())",
    ),
    "the mean over all batches of a step is one gradient: of one update, push, local step or message",
)  # fmt: skip

_SERVED = (
    "async()", "async(servers=2)", "softsync(updates=2)", "ssp(bound=3)", "bounded(staleness=2)",
    "elastic(push_every=2)",
)  # fmt: skip
_VALIDATED = (
    Row(
        (*_MEAN[:1], *_MEAN[3:]),
        "the parameters that all workers hold; all measure together, each its batches",
    ),
    Row(
        ("sync()", "backup()"),
        "the parameters that all workers hold; those that wait for the first worker measure with it",
    ),
    Row(
        _SERVED,
        "the parameters that the first worker holds: those it read last, with its own steps since then; the others "
        "measure with it as they come by, and go on training",
    ),
    Row(("localsgd(period=2)",), "the mean of the parameters of all workers; all measure together"),
    Row(
        ("decentralized()", 'decentralized(topology="ring")'),
        "the parameters of the first peer; all peers measure together",
    ),
    Row(
        ("decentralized(asynchronous=True, resync=2)",),
        "the parameters of the first peer, which measures alone while the others go on",
    ),
)
_PIPELINE = "pipeline(microbatches=2)"
_APART = (  # whose workers call no collective in the forward or backward pass
    "sync()", "backup()", "async()", "softsync(updates=2)", "ssp(bound=3)", "bounded(staleness=2)", "elastic()",
    "localsgd(period=2)", "decentralized()",
)  # fmt: skip

_TABLED = Row(
    (
        "sync()", "sync(servers=2)", "backup()", "async(servers=2)", "async(inflight=2)", "softsync(updates=2)",
        "ssp(bound=3)", "bounded(staleness=2)", "sync(servers=2, push_wire=topk())", 'async(push_wire="float16")',
        "async(damping=inverse())",
    ),
    "touched rows are pushed, and the rows of the next batch come with the answer; a codec is for the others",
)  # fmt: skip
_WHOLE = (
    "elastic()", "sync(optimizer=\"worker\")", "async(push_every=2)", "sync(damping=gap_aware())", "localsgd(period=2)",
    "decentralized()", _PIPELINE, "tensor(parallel=2)", "sharded()",
)  # fmt: skip

_DEALT = (*_ADDED.strategies, _PIPELINE, "async(push_every=2)")

FEATURES = (
    Feature(
        "data=Dataset",
        {"data": "dataset"},
        (
            Row(
                _DEALT,
                "dealt by index, in the order of shards with the same samples and chunks, to the same bits",
            ),
        ),
    ),
    Feature(
        "data=DataLoader",
        {"data": "loader"},
        (
            Row(
                _DEALT,
                "its dataset, `collate_fn`, worker processes, `batch_size`, `drop_last` and weights; the job deals the "
                "samples, and refuses a sampler of another kind",
            ),
        ),
    ),
    Feature(
        "data=IterableDataset",
        {"data": "stream"},
        (
            Row(
                _DEALT,
                "dealt by position in the stream, which every rank passes over; refused without a length or with more "
                "than one worker process",
            ),
        ),
    ),
    Feature(
        "data=Weighted",
        {"data": "weighted"},
        (
            Row(
                _DEALT,
                "each epoch is drawn with replacement by seed and epoch; its positions are dealt as always",
            ),
        ),
    ),
    Feature(
        "transform",
        {"transform": "noisy"},
        (Row(_DEALT, "every training batch, where it is read; random numbers belong to the sample"),),
    ),
    Feature(
        "x, y = batch",
        {"transform": "nested", "loss": "nested"},
        (
            Row(
                _DEALT,
                "batches of tuples, named tuples and nests, with texts among them, as the dataset, its `collate_fn` or "
                "the transform makes them; the trained model is the same to the bit as with a dict",
            ),
        ),
        changes_model=False,
        keeps_model=True,
    ),
    Feature(
        'precision="bfloat16"',
        {"precision": "bfloat16"},
        (
            Row(
                (*_ADDED.strategies, _PIPELINE, "async(push_every=2)"),
                "forward pass, loss and metrics; parameters, gradients and what is sent stay float32 (between the "
                "stages of a pipeline bfloat16 travels)",
            ),
        ),
    ),
    Feature(
        'precision="float16"',
        {"precision": "float16"},
        (
            Row(
                (*_ADDED.strategies, _PIPELINE, "async(push_every=2)"),
                "on a CPU, in this test and in virtual time: `bfloat16` needs no loss scale. On accelerators the loss "
                "is scaled under all of them but `allreduce()` with a codec",
                "scales the loss on an accelerator",
            ),
        ),
    ),
    Feature(
        "activation_checkpointing",
        {"activation_checkpointing": True},
        (
            Row(
                (*_ADDED.strategies, _PIPELINE, "async(push_every=2)"),
                "the layers of the model; the trained model is the same to the bit",
            ),
        ),
        changes_model=False,
        keeps_model=True,
    ),
    Feature(
        "sync_batchnorm",
        {"sync_batchnorm": True, "model": "normed"},
        (
            Row(
                ("allreduce()", "sharded()", "allreduce(codec=topk())", "allreduce(codec=float16())"),
                "statistics of the batches of all workers, in training; gradients are then exchanged as ever",
            ),
            Row(
                _APART,
                "workers do not meet in the forward pass; use `allreduce()`",
                "do not meet in the forward pass",
            ),
            Row(
                (_PIPELINE, "tensor(parallel=2)"),
                "layers may be slices or stages; use `allreduce()` or `sharded()`",
                "slices or stages",
            ),
        ),
        changes_model=False,
    ),
    Feature(
        "nn.Embedding(sparse=True)",
        {"model": "looked up", "optimizer": "plain"},
        (
            Row(("allreduce()",), "touched rows are gathered, or those that occur at all are added up"),
            _TABLED,
            Row(
                (*_WHOLE, "allreduce(codec=topk())"),
                "whole gradients or parameters travel; `Job(sparse_as_dense=True)` trains the layer with these",
                "leave sparse=True out",
            ),
        ),
    ),
    Feature(
        "ServedEmbedding",
        {"model": "served", "optimizer": "plain"},
        (
            _TABLED,
            Row(
                ("allreduce()", *_WHOLE),
                "no servers, or workers that move all parameters themselves",
                "nn.Embedding holds its rows",
            ),
        ),
    ),
    Feature(
        "compile",
        {"compile": "eager"},
        (
            Row(
                (*_ADDED.strategies, _PIPELINE, "async(push_every=2)"),
                "the model, a stage of it, or what of it torch can compile around the messages of its layers",
            ),
        ),
        changes_model=False,
    ),
    Feature(
        "accumulate",
        {"accumulate": 3},
        (
            _ADDED,
            Row(
                ("sync(push_every=2)", "async(push_every=2)"),
                "`push_every` pushes a sum over several batches already; leave either out",
                "pushes the sum over several batches already",
            ),
            Row(
                (_PIPELINE,),
                "microbatches are that; multiply `batch_size` and `microbatches` by the same number",
                "adds up the gradients of its microbatches",
            ),
        ),
    ),
    Feature(
        "clip_norm",
        {"clip_norm": 0.05},
        (
            Row(
                (*_MEAN, "sync(servers=2)", "backup(servers=2)"),
                "the mean gradient of all workers, once an update; several servers exchange the norms of their parts",
            ),
            *_OWN_ROWS,
            _CORRECTED,
        ),
    ),
    Feature(
        "clip_value",
        {"clip_value": 0.01},
        (
            Row(
                (*_MEAN, "sync(servers=2)", "backup(servers=2)"),
                "the mean gradient of all workers, once an update",
            ),
            *_OWN_ROWS,
            _CORRECTED,
        ),
    ),
    Feature(
        "gradient_noise",
        {"gradient_noise": 0.01},
        (
            Row(
                (*_MEAN, "sync(servers=2)", "backup(servers=2)"),
                "the mean gradient of all workers, once an update; servers, slices and stages draw for what they hold",
            ),
            Row(_CODED[:2], "the mean that the codec makes, which every worker steps with"),
            Row(
                (*_OWN, *_CODED[2:], *_MOVING),
                "each worker's own gradient, before the codec, the push or its own step",
            ),
        ),
    ),
    Feature(
        "scheduler",
        {"scheduler": "one cycle"},
        (
            Row(
                (*_MEAN, "sync(servers=2)", "allreduce(codec=topk())"),
                "the optimizer of all workers, stepped once an update of a full batch of all workers",
            ),
            Row(
                _SERVED[:-1],
                "the servers' optimizer, by accepted samples: as many steps as under `allreduce()`",
            ),
            Row(
                (
                    "elastic(push_every=2)",
                    'sync(optimizer="worker")',
                    "localsgd(period=2)",
                    "decentralized()",
                ),
                "each worker's own optimizer, by the samples of all workers",
            ),
        ),
    ),
    Feature(
        "scheduler=ReduceLROnPlateau",
        {"scheduler": "plateau"},
        (
            Row(
                (*_MEAN, "sync(servers=2)", "allreduce(codec=topk())", *_SERVED[:-1]),
                "the optimizer of all workers, stepped after every validation, which one rank has concluded and all "
                "are told of",
            ),
            Row(
                ("localsgd(period=2)", "decentralized()"),
                "each worker's own optimizer, at the same step of all, with the figure of the first",
            ),
            Row(
                ("elastic(push_every=2)", 'sync(optimizer="worker")'),
                "each worker's own optimizer, from the dealing server's next answer on",
            ),
            Row(
                ("decentralized(asynchronous=True, resync=2)",),
                "each peer's own optimizer, from the next meeting on",
            ),
            Row(
                ("decentralized(asynchronous=True)",),
                "peers that never meet before the end cannot be told what the first one has measured: give `resync=R`",
                "give resync=R",
            ),
        ),
    ),
    Feature(
        "optimizer={...}, step",
        {"step": "gan"},
        (
            Row(
                ("allreduce()", "sync()", "sync(servers=2)"),
                "the mean gradient of all workers, once a step of each optimizer",
            ),
            Row(
                ("localsgd(period=2)", 'sync(optimizer="worker")', 'async(optimizer="worker")', "elastic()"),
                "each worker's own gradients and optimizers; how far they have gone together is averaged, or pushed",
            ),
            Row(
                (
                    "backup()",
                    "sync(push_wire=topk())",
                    "async()",
                    "async(servers=2)",
                    "softsync(updates=2)",
                    "ssp(bound=3)",
                    "bounded(staleness=2)",
                ),
                "a step function takes several steps in a batch, each from where the one before has led, and to "
                'servers a batch is one gradient; use `optimizer="worker"`',
                "to servers a batch is one gradient",
            ),
            Row(
                ("decentralized()", "sharded()", "tensor(parallel=2)", _PIPELINE),
                "here a batch is one gradient",
                "a batch is one gradient",
            ),
            Row(
                ("allreduce(codec=topk())", "allreduce(codec=float16())"),
                "a codec codes the gradients of one backward pass a step",
                "of one backward pass a step",
            ),
        ),
    ),
    Feature(
        "ema",
        {"ema": 0.5},
        (
            Row(
                (*_MEAN[:1], *_MEAN[3:]),
                "the weights that all workers hold, after every update, each its part",
            ),
            Row(
                ("sync()", "backup()", *_SERVED, "sync(servers=2)"),
                "what each server holds, after each of its updates",
            ),
            Row(
                ("localsgd(period=2)",),
                "the mean of all workers, after every averaging; the weights, after every step in which gradients are "
                "averaged",
            ),
            Row(
                ("decentralized()", 'decentralized(topology="ring")'),
                "the first peer's weights, after every step",
            ),
        ),
        changes_model=False,
        leaves="model-ema.safetensors",
    ),
    Feature(
        "keep_best",
        {"keep_best": "validation_loss"},
        _VALIDATED,
        changes_model=False,
        leaves="model-best.safetensors",
    ),
    Feature(
        "trace",
        {"trace": "steps=1:3"},
        (
            Row((*_MEAN[:1], *_MEAN[3:], "localsgd(period=2)"), "the steps that all ranks take together"),
            Row(
                ("sync()", "backup()", *_SERVED, "async(inflight=2)"),
                "each worker's own steps; each server from the first push of one of them until all workers are past "
                "them",
            ),
            Row(
                ("decentralized()", "decentralized(asynchronous=True)", "decentralized(codec=topk())"),
                "each peer's own steps",
            ),
        ),
        changes_model=False,
        leaves="trace-rank-0.json",
        keeps_model=True,
    ),
    Feature("validate_every", {"validate_every": "12 samples"}, _VALIDATED, changes_model=False),
    Feature(
        "metrics=Collected",
        {"metrics": "collected"},
        _VALIDATED,
        changes_model=False,
        keeps_model=True,
        measures="middle",
    ),
    Feature(
        "validate_ema",
        {"ema": 0.5, "validate_ema": True},
        _VALIDATED,
        changes_model=False,
        keeps_model=True,
        measures="ema_validation_loss",
    ),
    Feature(
        "patience",
        {"patience": 1, "keep_best": ">validation_loss", "validate_every": "12 samples", "epochs": 6},
        (
            Row(
                (*_MEAN, *_SERVED, "localsgd(period=2)", "sync(servers=2)"),
                "the run, for all workers at once",
            ),
            Row(
                (
                    "decentralized()",
                    'decentralized(topology="ring")',
                    "decentralized(asynchronous=True, resync=2)",
                ),
                "the run: the first peer knows, and all agree after their next step, or at their next meeting",
            ),
            Row(
                ("decentralized(asynchronous=True)",),
                "peers that never meet before the end cannot agree on one: give `resync=R`",
                "agree to end when they meet",
            ),
        ),
        says="ended_early",
    ),
)


def features() -> str:
    """A row for every feature and kind of outcome."""
    rows = [("feature", "strategies", "", "what it acts on, or why it is refused")]
    for feature in FEATURES:
        for row in feature.rows:
            texts = ", ".join(f"`{cell(text)}`" for text in row.strategies)
            rows.append((f"`{feature.name}`", texts, "refused" if row.said else "works", cell(row.what)))
    return table(*rows)


SECTIONS = {"features": features}
