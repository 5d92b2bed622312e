"""The sections of `benchmarks/README.md` on the libraries that users would pick: first where one of them is faster.

Invariants: every library's fastest way stands beside ours. It is called faster where the whole interval of our speed
over its own lies below 1, and not told from ours where 1 is inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from docs.markdown import table
from pages.rows import Row, newest, origin, spread


class Pair(NamedTuple):
    """Ours beside one way of a library.

    Attributes:
        case: what was asked of both. way: the library's.
        ours, theirs: figures as text.
        over: our speed over theirs, with its interval.
    """

    case: str
    way: str
    ours: str
    theirs: str
    over: Sequence[float]

    @property
    def text(self) -> str:
        """For a list."""
        return f"{self.way} ({self.case}: ours makes {spread(self.over)} of its speed)"


def reading_pairs(row: Row) -> Iterator[Pair]:
    for num_bytes, case in row["cases"].items():
        speeds, best = case["samples_per_second"], case["best"]
        texts = (f"{speeds[way]:,.0f} samples/s" for way in ("mpitrain", best))
        yield Pair(f"samples of {num_bytes} B", best, *texts, case["mpitrain_over"][best])


def sparse_pairs(row: Row) -> Iterator[Pair]:
    speeds, over = row["samples_per_second"], row["ours_over"]
    best = max((way for way in speeds if way not in over), key=lambda way: speeds[way])
    for rule in over:
        texts = (f"{speeds[way]:,.0f} samples/s" for way in (rule, best))
        yield Pair(
            f"{row['rows']:,} rows, batch {row['batch']}, `{rule}(servers=2)`", best, *texts, over[rule][best]
        )


def averaging_pairs(row: Row) -> Iterator[Pair]:
    for rule in row["step_ratio"]:
        for name in ("step", "averaging"):
            times = (f"{row[f'{name}_ms'][f'{who} {rule}']:.1f} ms" for who in ("mpitrain", row["library"]))
            case = f"{row['model']}, `{rule}` every {row['period']} steps, one {name}"
            yield Pair(case, row["library"], *times, _inverse(row[f"{name}_ratio"][rule]))


def sweep_pairs(row: Row) -> Iterator[Pair]:
    for rule, ratio in row["elapsed_ratio"].items():
        times = (
            f"{row['median'][f'{who} {rule}']['elapsed_s']:.1f} s" for who in ("mpitrain", row["library"])
        )
        case = f"{row['trials']} trials of {row['epochs']} epochs, {rule}"
        yield Pair(case, row["library"], *times, _inverse(ratio))


def _inverse(ratio: Sequence[float]) -> tuple[float, float, float]:
    """Our speed over theirs, of our time over theirs."""
    middle, low, high = ratio
    return 1 / middle, 1 / high, 1 / low


PAIRS: dict[str, Callable[[Row], Iterator[Pair]]] = {
    "reading": reading_pairs,
    "sparse_tables": sparse_pairs,
    "low_communication": averaging_pairs,
    "sweeps": sweep_pairs,
}


def _rows(name: str) -> list[Row]:
    keys = {"sparse_tables": ("rows", "batch", "hidden"), "low_communication": ("model", "period"),
            "sweeps": ("trials", "epochs", "score")}  # fmt: skip
    return list(newest(name, "library", *keys.get(name, ())).values())


def verdict(pairs: Iterable[Pair]) -> str:
    """Where a library is faster than ours, then where neither is."""
    found = list(pairs)
    faster = [pair.text for pair in sorted(found, key=lambda pair: pair.over[0]) if pair.over[2] < 1]
    equal = [f"{pair.way} ({pair.case})" for pair in found if pair.over[1] <= 1 <= pair.over[2]]
    told = [
        f"**Faster than ours: {'; '.join(faster)}.**"
        if faster
        else "Nothing measured here is faster than ours."
    ]
    told += [f"Not to be told from ours: {'; '.join(equal)}."] if equal else []
    return "\n\n".join(told)


def needed(rows: Iterable[Row]) -> str:
    """What was installed for each library."""
    lists = {row["library"]: row["libraries"] for row in rows}
    return "\n".join(f"- {name} needed {', '.join(found)}" for name, found in lists.items())


def section(name: str) -> str:
    """Ours and every library, of one question."""
    rows = _rows(name)
    pairs = [pair for row in rows for pair in PAIRS[name](row)]
    head = ("", "library", "ours", "the library", "our speed over its own (95 %)")
    body = [(pair.case, pair.way, pair.ours, pair.theirs, spread(pair.over)) for pair in pairs]
    more = {"sweeps": _sweeps, "low_communication": _weights}.get(name, lambda _: "")(rows)
    texts = (verdict(pairs), table(head, *body), more, needed(rows), origin(*rows))
    return "\n\n".join(filter(None, texts))


def _sweeps(rows: Sequence[Row]) -> str:
    """Where a library's workers are less idle, or fewer samples were needed, and all medians."""
    better, body = [], []
    for row in rows:
        for way, one in row["median"].items():
            who, _, rule = way.partition(" ")
            own = row["median"].get(f"mpitrain {rule}", one)
            if one["idle_share"] < own["idle_share"]:
                better.append(f"{way} is idle for {one['idle_share']:.1%}, ours for {own['idle_share']:.1%}")
            if _samples(one) < _samples(own):
                better.append(f"{way} needs {_told(one)} samples to {row['score']:g}, ours {_told(own)}")
            body.append(
                (row["library"], f"{who} {rule}", f"{one['idle_share']:.1%}", _told(one), f"{one['samples']:,.0f}",
                 f"{one['best']:.4f}")
            )  # fmt: skip
    head = ("beside", "way", "idle", "samples to the score", "samples in all", "best score")
    told = f"**Better than ours: {'; '.join(better)}.**\n\n" if better else ""
    return f"{told}Medians over seeds; `-`: not reached.\n\n" + table(head, *body)


def _samples(one: Row) -> float:
    found = one["samples_to_score"]
    return float("inf") if found is None else float(found)


def _told(one: Row) -> str:
    return "-" if one["samples_to_score"] is None else f"{one['samples_to_score']:,.0f}"


def _weights(rows: Sequence[Row]) -> str:
    """How far final weights of one rule lie apart."""
    return "\n".join(
        f"- {row['library']}, {row['model']}: final weights of `{rule}` differ from ours by {apart:.1e} of their norm"
        for row in rows
        for rule, apart in row["weights_apart"].items()
    )


def _section(name: str) -> Callable[[], str]:
    return lambda: section(name)


PROGRAMS: dict[str, Callable[[], str]] = {name: _section(name) for name in PAIRS}
