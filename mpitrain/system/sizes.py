"""Bytes and counts as people read them.

Invariants: text from numbers, and nothing else.
"""

from __future__ import annotations


def size_text(num_bytes: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    raise AssertionError


def significant(value: float, digits: int = 4) -> str:
    """A number at so many significant digits, and whole digits in place of a power of ten: 12346, not 1.235e+04."""
    text = f"{value:.{digits}g}"
    return f"{value:.0f}" if "e+" in text and abs(value) < 1e15 else text


def counted(number: int, what: str) -> str:
    """1 worker, 2 workers."""
    return f"{number} {what}{'s' * (number != 1)}"
