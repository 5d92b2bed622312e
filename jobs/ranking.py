"""Click ranking: hashed categories in one table of sparse gradients, and a small dense tower on top.

mpitrain data pack jobs/ranking.py:clicks data/ranking
mpitrain launch -n 4 train jobs/ranking.py
RANKING_SERVED=1 mpitrain launch -n 6 train jobs/ranking.py --strategy "async(servers=2)"   # rows on servers alone
mpitrain launch -n 6 train jobs/ranking.py --strategy "hybrid(servers=2)"                   # rows there, the rest not
RANKING_SPARSE=0 mpitrain launch -n 5 train jobs/ranking.py --strategy "async(servers=1)"   # sends the whole table

RANKING_CRITEO=train.txt mpitrain data pack jobs/ranking.py:criteo data/ranking             # Criteo's public columns
RANKING_CRITEO=train.txt mpitrain launch -n 4 train jobs/ranking.py
"""

import os
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from torch import nn

import mpitrain as mt

CRITEO = os.environ.get("RANKING_CRITEO", "")
NUMBERS, FIELDS = (13, 26) if CRITEO else (4, 5)
ROWS = int(os.environ.get("RANKING_ROWS", str(1 << 17)))
SPARSE = os.environ.get("RANKING_SPARSE", "1") == "1"
SERVED = os.environ.get("RANKING_SERVED", "0") == "1"
CATEGORIES = (10, 100, 1000, 10_000, 50_000)  # of each field of `clicks`


def clicks() -> dict[str, np.ndarray]:
    """Impressions whose categories follow Zipf's law, clicked with a known probability: log odds are a sum over the
    categories and numbers. `base`: the loss of the click rate alone, `best`: of the probabilities themselves."""
    count, draw = int(os.environ.get("RANKING_SAMPLES", "150000")), np.random.default_rng(0)
    ids, odds = np.empty((count, FIELDS), np.int64), np.full(count, -1.0)
    for field, size in enumerate(CATEGORIES):
        share = np.arange(1, size + 1) ** -1.2
        ids[:, field] = draw.choice(size, count, p=share / share.sum())
        odds += draw.normal(0.0, 0.9, size)[ids[:, field]]
    numbers = draw.normal(size=(count, NUMBERS)).astype(np.float32)
    odds += numbers @ draw.normal(0.0, 0.5, NUMBERS)
    chance = 1 / (1 + np.exp(-odds))
    clicked = (draw.random(count) < chance).astype(np.float32)
    base, best = (entropy(one).astype(np.float32).mean() for one in (clicked.mean(keepdims=True), chance))
    constant = {"base": np.full(count, base), "best": np.full(count, best)}
    return {"ids": ids, "numbers": numbers, "clicked": clicked, **constant}


def entropy(chance: np.ndarray) -> np.ndarray:
    return -(chance * np.log(chance) + (1 - chance) * np.log(1 - chance))


def criteo() -> Iterator[dict[str, np.ndarray]]:
    """Lines of tab-separated fields: clicked or not, 13 whole numbers, 26 categories in hexadecimal. All but the first
    may be missing."""
    with open(CRITEO, encoding="ascii") as lines:
        for line_number, line in enumerate(lines, 1):
            clicked, *fields = line.rstrip("\n").split("\t")
            if len(fields) != NUMBERS + FIELDS or clicked not in ("0", "1"):
                raise ValueError(
                    f"{CRITEO}, line {line_number}: want 0 or 1, {NUMBERS} numbers and {FIELDS} categories"
                )
            numbers = [np.log1p(max(int(one or 0), 0)) for one in fields[:NUMBERS]]
            ids = [int(one, 16) + 1 if one else 0 for one in fields[NUMBERS:]]
            yield {
                "ids": np.array(ids, np.int64),
                "numbers": np.array(numbers, np.float32),
                "clicked": np.float32(clicked),
            }


class Ranking(nn.Module):
    def __init__(self, width: int = 16):
        super().__init__()
        if SERVED:
            self.table, self.bias = mt.ServedEmbedding(ROWS, width), mt.ServedEmbedding(ROWS, 1, init="zeros")
        else:
            self.table, self.bias = (
                nn.Embedding(ROWS, width, sparse=SPARSE),
                nn.Embedding(ROWS, 1, sparse=SPARSE),
            )
            nn.init.normal_(self.table.weight, std=0.01)
            nn.init.zeros_(self.bias.weight)
        self.tower = nn.Sequential(nn.Linear(FIELDS * width + NUMBERS, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, ids: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """The log odds of a click of every sample."""
        rows = (ids * FIELDS + torch.arange(FIELDS, device=ids.device)) * 0x9E3779B1 % (2**61 - 1) % ROWS
        whole = torch.cat([self.table(rows).flatten(1), numbers], dim=1)
        return (self.tower(whole) + self.bias(rows).sum(1)).squeeze(1)


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    odds = model(batch["ids"], batch["numbers"])
    return nn.functional.binary_cross_entropy_with_logits(odds, batch["clicked"])


def metrics(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    if "best" not in batch:
        return {}
    base, best = batch["base"].mean(), batch["best"].mean()
    return {"gap_closed": (base - loss(model, batch)) / (base - best)}


job = mt.Job(
    model=Ranking,
    loss=loss,
    optimizer=partial(torch.optim.Adagrad, lr=0.05),
    data=mt.Shards("data/ranking/train-*.h5"),
    validate=mt.Shards("data/ranking/validate-*.h5"),
    metrics=metrics,
    epochs=1,
    batch_size=64,
    target={} if CRITEO else {"gap_closed": 0.8},
)
