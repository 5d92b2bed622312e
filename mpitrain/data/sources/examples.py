"""Data that is there without a download: scikit-learn's digits, and the text that ships with Python."""

from __future__ import annotations

import numpy as np

from mpitrain.data.format.columns import Columns
from mpitrain.data.sources.base import needing


def digits() -> Columns:
    """scikit-learn's 1,797 handwritten digits: x float32 (1, 8, 8) in [0, 1], y int64."""
    with needing("`digits` ships with scikit-learn", "data"):
        from sklearn.datasets import load_digits
    loaded = load_digits()
    return {"x": (loaded.images / 16).astype(np.float32)[:, None], "y": loaded.target.astype(np.int64)}


def topics() -> Columns:
    """What `help()` prints about the language, cut into runs of 64 characters and the one that follows."""
    from pydoc_data.topics import topics as texts

    text = "\n\n".join(texts[name] for name in sorted(texts))
    characters = np.frombuffer(text.encode("ascii", "ignore"), dtype=np.uint8)
    num_samples = (len(characters) - 1) // 64
    starts = 64 * np.arange(num_samples)[:, None]
    return {"text": characters[starts + np.arange(65)]}
