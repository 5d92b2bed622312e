"""The sections of `benchmarks/README.md` on large models: their steps, their memory and their checkpoints."""

from __future__ import annotations

from collections.abc import Callable

from docs.markdown import table
from pages.rows import newest, one, origin, spread


def large() -> str:
    found = newest("large", "pages", "ranks")
    head = ("196 MB of parameters", "ranks", "pages", "ms", "ratio (95 %)", "page faults")
    body = []
    for (pages, ranks), row in found.items():
        ratios = {way: f"{spread(ratio)} of gloo" for way, ratio in row["step_ratio"].items()}
        ratios["localsgd"] = f"{spread(row['averaging_ratio'])} of bare"
        for way, milliseconds in row["median_ms"].items():
            faults = f"{row['faults'][way]:,.0f}"
            body.append((way, str(ranks), pages, f"{milliseconds:.1f}", ratios.get(way, ""), faults))
    return table(head, *body) + "\n\n" + origin(*found.values())


def memory() -> str:
    row = one("memory")
    head = ("strategy", "end", "most beyond its size before, MB", "when it went on, MB", "s")
    body = [
        (f"`{way}`", found["end"],
         *(f"{max(found[key]) / 1e6:.0f}" if found[key] else "" for key in ("more", "resumed_more")),
         f"{found['seconds']:.0f}")
        for way, found in row["ways"].items()
    ]  # fmt: skip
    millions, needed, allowed = (row[key] / 1e6 for key in ("num_parameters", "needed", "allowed"))
    told = f"{row['ranks']} ranks, {millions:.0f} million parameters: with gradients and Adam's state "
    told += f"{needed:,.0f} MB, of which a rank may use {allowed:.0f} MB beyond its size before the model is built. "
    told += "Checkpoints, the saved model and a second launch from a checkpoint are included."
    return table(head, *body) + f"\n\n{told}\n\n" + origin(row)


def memory_told() -> str:
    rows = [*newest("memory_told", "layers", "optimizer").values()]
    head = ("layers", "optimizer", "strategy", "rank", "told, MB", "measured, MB", "told / measured")
    body = [
        (f"{row['layers']}", row["optimizer"], f"`{way}`", kind, f"{one['told'] / 1e6:.0f}",
         f"{one['measured'] / 1e6:.0f}", f"{one['told'] / one['measured']:.2f}")
        for row in rows for way, kinds in row["ways"].items() for kind, one in kinds.items()
    ]  # fmt: skip
    return table(head, *body) + "\n\n" + origin(*rows)


def beside_checkpoint() -> str:
    rows = [*newest("beside_checkpoint", "width", "ranks").values()]
    head = (
        "state", "ranks", "a step beside a checkpoint / alone (95 %)", "a part / `torch.save` with fsync (95 %)",
        "where training pauses, s",
    )  # fmt: skip
    body = [
        (f"{12 * row['width'] ** 2 / 1e6:.0f} MB", str(row["ranks"]), spread(row["step_ratio"]),
         spread(row["save_ratio"]), spread(row["pause_s"]))
        for row in rows
    ]  # fmt: skip
    return table(head, *body) + "\n\n" + origin(*rows)


PROGRAMS: dict[str, Callable[[], str]] = {
    "large": large,
    "memory": memory,
    "memory_told": memory_told,
    "beside_checkpoint": beside_checkpoint,
}
