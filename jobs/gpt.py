"""GPT-2 with 124 million parameters, on the bytes of Python's own documentation; smaller ones by `--set`.

mpitrain data pack jobs/gpt.py:text data/gpt
mpitrain launch -n 2 train jobs/gpt.py --set model.layers=2 --set model.width=128 --set model.heads=4 \\
    --set model.context=128                                                             # minutes on a laptop
mpitrain launch -n 8 train jobs/gpt.py --accumulate 8 --precision bfloat16              # all of it: GPUs
mpitrain launch -n 8 train jobs/gpt.py --strategy "localsgd(period=32,outer=diloco())"
mpitrain launch -n 2 train jobs/gpt.py --set model.tied=false --strategy "pipeline(stages=2,microbatches=2)"

The vocabulary has the size of GPT-2's, so its table and its logits cost what they cost there; the text uses 256 of it.
A pipeline holds the two ends of the model on different ranks, so there the embedding is not tied to the logits.
"""

from functools import partial

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import mpitrain as mt

sizes = mt.Options(
    "model", layers=12, width=768, heads=12, context=1024, vocabulary=50304, dropout=0.0, tied=True
)


def text() -> dict[str, np.ndarray]:
    """What `help()` prints about the language, cut into runs of 1,024 bytes and the one that follows."""
    from pydoc_data.topics import topics

    joined = "\n\n".join(topics[name] for name in sorted(topics))
    found = np.frombuffer(joined.encode(), dtype=np.uint8)
    starts = 1024 * np.arange((len(found) - 1) // 1024)[:, None]
    return {"text": found[starts + np.arange(1025)]}


class Embedding(nn.Module):
    """Tokens (batch, length) become vectors (batch, length, width), with their places in them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.places = nn.Embedding(sizes.context, sizes.width)
        self.dropout = nn.Dropout(sizes.dropout)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.size(1), device=tokens.device)
        return self.dropout(self.tokens(tokens) + self.places(places))


class Block(nn.Module):
    """Attention to what came before, then two dense layers; each adds to its input."""

    def __init__(self) -> None:
        super().__init__()
        width = sizes.width
        self.attention_norm, self.dense_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values, self.mixed = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(sizes.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.queries_keys_values(self.attention_norm(x)).chunk(3, dim=2)
        queries, keys, values = (part.unflatten(2, (sizes.heads, -1)).transpose(1, 2) for part in parts)
        rate = sizes.dropout if self.training else 0.0
        seen = functional.scaled_dot_product_attention(queries, keys, values, dropout_p=rate, is_causal=True)
        x = x + self.dropout(self.mixed(seen.transpose(1, 2).flatten(2)))
        dense = functional.gelu(self.wide(self.dense_norm(x)), approximate="tanh")
        return x + self.dropout(self.narrow(dense))


class Logits(nn.Module):
    """Vectors become logits (batch, length, vocabulary) of the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(sizes.width)
        self.vocabulary = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.vocabulary(self.norm(x))


def gpt() -> nn.Module:
    """The layers one after the other, with the weights that GPT-2 begins with."""
    embedding, logits = Embedding(), Logits()
    if sizes.tied:
        logits.vocabulary.weight = embedding.tokens.weight
    found = nn.Sequential(embedding, *(Block() for _ in range(sizes.layers)), logits)
    for name, weight in found.named_parameters():
        if weight.ndim == 2:
            ends_block = name.endswith(("mixed.weight", "narrow.weight"))
            nn.init.normal_(weight, std=0.02 / (2 * sizes.layers) ** 0.5 if ends_block else 0.02)
        elif name.endswith("bias"):
            nn.init.zeros_(weight)
    return found


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    tokens = batch["text"][:, : sizes.context + 1].long()
    return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


job = mt.Job(
    model=gpt,
    loss=loss,
    optimizer=partial(torch.optim.AdamW, lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1),
    data=mt.Shards("data/gpt/train-*.h5"),
    validate=mt.Shards("data/gpt/validate-*.h5"),
    epochs=4,
    batch_size=2,
    clip_norm=1.0,
    synthetic=mt.Synthetic(512, text=((sizes.context + 1,), "uint8", 256)),
)
