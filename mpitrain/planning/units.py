"""Numbers of a dry run as people read them.

Invariants: text from numbers, and nothing else.
"""

from __future__ import annotations


def break_even(saved_bytes: float, cost_s: float) -> list[str]:
    """The link rate at which saved bytes are worth so many seconds."""
    if saved_bytes <= 0:
        return ["            does not pay on any link: it sends no fewer bytes"]
    rate = rate_text(8 * saved_bytes / max(cost_s, 1e-9))
    return [f"            pays on links below {rate}, does not pay above {rate} (break-even)"]


def rate_text(bits_per_s: float) -> str:
    """A link rate for people."""
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if bits_per_s >= size:
            return f"{bits_per_s / size:.3g} {unit}"
    return f"{bits_per_s / 1e3:.3g} kbit/s"
