"""Translation of numbers in English words into German ones, by an encoder and a decoder with attention.

mpitrain data pack jobs/nmt.py:numbers data/numbers
mpitrain launch -n 4 train jobs/nmt.py
mpitrain launch -n 4 train jobs/nmt.py --strategy "async(servers=1)"
python jobs/nmt.py runs/nmt-DATE-TIME "forty seven thousand eleven"

The order of words differs ("forty seven" is "sieben und vierzig"), so the decoder has to look back and forth. Each
number has one translation, so the bound of the loss is 0.
"""

import os
import sys
from functools import partial

import numpy as np
import torch
from torch import nn

import mpitrain as mt

HIDDEN = mt.Options("model", hidden=64).hidden
LIMIT, LENGTH = 1_000_000, 12  # numbers below this; words of the longest, and its end
BELOW_100_ENGLISH = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen
sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety"""
BELOW_100_GERMAN = """null ein zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn
sechzehn siebzehn achtzehn neunzehn zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig"""
ONE, EIN = BELOW_100_ENGLISH.split(), BELOW_100_GERMAN.split()
PAD, END = 0, 1
ENGLISH = {word: 2 + index for index, word in enumerate([*ONE, "hundred", "thousand"])}
GERMAN = {word: 2 + index for index, word in enumerate([*EIN, "und", "hundert", "tausend"])}


def english(number: int) -> list[str]:
    for size, word in ((1000, "thousand"), (100, "hundred")):
        if number >= size:
            rest = english(number % size) if number % size else []
            return [*english(number // size), word, *rest]
    if number < 20:
        return [ONE[number]]
    return [ONE[18 + number // 10], *([ONE[number % 10]] if number % 10 else [])]


def german(number: int) -> list[str]:
    for size, word in ((1000, "tausend"), (100, "hundert")):
        if number >= size:
            rest = german(number % size) if number % size else []
            return [*german(number // size), word, *rest]
    if number < 20:
        return [EIN[number]]
    return [*([EIN[number % 10], "und"] if number % 10 else []), EIN[18 + number // 10]]


def numbers() -> dict[str, np.ndarray]:
    """Words of distinct numbers in both languages as whole numbers, then END, then PAD."""
    count, draw = int(os.environ.get("NMT_SAMPLES", "12000")), np.random.default_rng(0)
    columns = {name: np.full((count, LENGTH), PAD, np.int64) for name in ("source", "target")}
    for row, number in enumerate(draw.choice(LIMIT, count, replace=False).tolist()):
        for name, words, known in (("source", english, ENGLISH), ("target", german, GERMAN)):
            ids = [*(known[word] for word in words(number)), END]
            columns[name][row, : len(ids)] = ids
    return columns


class Translator(nn.Module):
    """A bidirectional encoder; a decoder that sees the word before, and a mean of the encoder's states by attention."""

    def __init__(self) -> None:
        super().__init__()
        self.source = nn.Embedding(2 + len(ENGLISH), HIDDEN)
        self.target = nn.Embedding(2 + len(GERMAN), HIDDEN)
        self.encoder = nn.GRU(HIDDEN, HIDDEN, batch_first=True, bidirectional=True)
        self.decoder = nn.GRU(HIDDEN, HIDDEN, batch_first=True)
        self.keys = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        self.words = nn.Linear(3 * HIDDEN, 2 + len(GERMAN))

    def forward(self, source: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Logits (batch, words, vocabulary) of each word, given the source and the words before it."""
        states, _ = self.encoder(self.source(source))
        outputs, _ = self.decoder(self.target(before))
        scores = outputs @ self.keys(states).transpose(1, 2) / HIDDEN**0.5
        weights = scores.masked_fill((source == PAD)[:, None], float("-inf")).softmax(dim=2)
        return self.words(torch.cat([outputs, weights @ states], dim=2))


def logits(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(batch["source"], nn.functional.pad(batch["target"][:, :-1], (1, 0), value=END))


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    found, wanted = logits(model, batch).transpose(1, 2), batch["target"]
    return nn.functional.cross_entropy(found, wanted, reduction="none")[wanted != PAD].sum() / len(wanted)


def translate(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The most likely word, given those chosen before it, one after the other: (batch, words)."""
    words = batch["source"].new_full((len(batch["source"]), 1), END)
    for _ in range(LENGTH):
        words = torch.cat([words, model(batch["source"], words)[:, -1:].argmax(dim=2)], dim=1)
    ended = (words[:, 1:] == END).cumsum(dim=1)
    return words[:, 1:].masked_fill((ended - (words[:, 1:] == END).long()) > 0, PAD)


def metrics(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The share of numbers of which every word is right, each given the right words before it: so many `translate`
    gives exactly. And the loss of a word."""
    right = (logits(model, batch).argmax(dim=2) == batch["target"]) | (batch["target"] == PAD)
    words = (batch["target"] != PAD).sum() / len(batch["target"])
    return {"sentences": right.all(dim=1).float().mean(), "word_loss": loss(model, batch) / words}


job = mt.Job(
    model=Translator,
    loss=loss,
    optimizer=partial(torch.optim.Adam, lr=3e-3),
    data=mt.Shards("data/numbers/train-*.h5"),
    validate=mt.Shards("data/numbers/validate-*.h5"),
    metrics=metrics,
    predict=translate,
    epochs=2,
    batch_size=32,
    target={"sentences": 0.97},
    synthetic=mt.Synthetic(
        4096, source=((LENGTH,), "int64", 2 + len(ENGLISH)), target=((LENGTH,), "int64", 2 + len(GERMAN))
    ),
)

if __name__ == "__main__":
    asked = sys.argv[2].split()
    if unknown := set(asked) - set(ENGLISH):
        sys.exit(f"no word of a number: {' '.join(unknown)}; there are {' '.join(ENGLISH)}")
    source = torch.tensor([[*(ENGLISH[word] for word in asked), END]])
    found = translate(mt.load(sys.argv[1]), {"source": source})[0].tolist()
    print(*(word for index in found for word, known in GERMAN.items() if known == index))
