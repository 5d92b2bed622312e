"""Numbers in words of the command line: each is read, or refused in the words that `argparse` prints.

Invariants: standard library only.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def positives(text: str) -> tuple[int, ...]:
    """Whole numbers of at least 1, with commas between them."""
    return tuple(positive(one) for one in text.split(","))


def natural(text: str) -> int:
    """A whole number of at least 0."""
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def number(text: str, fits: Callable[[float], bool], what: str) -> float:
    """A number that `fits`; one that does not, which NaN never does, is refused as not being `what`."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not fits(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return value


def rate(text: str) -> float:
    """A finite number of at least 0."""
    return number(text, lambda value: 0 <= value < math.inf, "a finite number of at least 0")


def fraction(text: str) -> float:
    """A number of at least 0 and below 1."""
    return number(text, lambda value: 0 <= value < 1, "a number of at least 0 and below 1")


def above_zero(text: str) -> float:
    """A finite number greater than 0."""
    return number(text, lambda value: 0 < value < math.inf, "a finite number greater than 0")
