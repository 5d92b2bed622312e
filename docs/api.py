"""The public names of `mpitrain`, in groups: the tables of `docs/reference.md`, and what the site adds below them."""

from __future__ import annotations

import inspect

import mpitrain
from docs.markdown import cell, table
from mpitrain.strategies import registry

NAMES = {
    "Jobs and runs": (
        "Job", "Options", "Collected", "PerEpoch", "train", "simulate", "load", "predict", "ensemble", "export",
    ),
    "Data": (
        "Shards", "Samples", "Stream", "Synthetic", "Transformed", "Weighted", "pack", "PackOptions", "ShardWriter",
    ),
    "A loop of your own": (
        "wrap", "worker_index", "num_workers", "save", "resumed", "finish", "attach_codec", "exclusive_mpi",
    ),
    "Tables on servers": ("ServedEmbedding", "RowwiseAdagrad"),
    "Stragglers to order": ("Slow", "Pause", "Stall"),
}  # fmt: skip
KINDS = {
    "strategy": "Strategies",
    "damping": "Dampings",
    "codec": "Codecs",
    "schedule": "Schedules",
    "warmup": "Warm-up",
    "batching": "Batch sizes of workers",
    "outer": "Outer optimizers",
}


def groups() -> dict[str, tuple[str, ...]]:
    """Every public name once."""
    found = dict(NAMES)
    for row in registry.rows():
        found[KINDS[row.kind]] = (*found.get(KINDS[row.kind], ()), row.public)
    return found


def sentence(name: str) -> str:
    """The first sentence of what a name says of itself."""
    told = " ".join((inspect.getdoc(getattr(mpitrain, name)) or "").split("\n\n")[0].split())
    return told.split(". ")[0].rstrip(".") + "."


def listed() -> str:
    """A table for each group."""
    parts = []
    for head, names in groups().items():
        rows = ((f"`mt.{name}`", cell(sentence(name))) for name in names)
        parts += [f"## {head}", table(("name", "what it is"), *rows)]
    return "\n\n".join(parts)


SECTIONS = {"public names": listed}
