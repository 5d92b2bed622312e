"""The sections of `benchmarks/README.md` on messages: pushes to servers, their parts, and collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from docs.markdown import table
from pages.rows import duration, newest, origin, size, spread

Row = dict[str, Any]


def server() -> str:
    ways = ("ours", "bare mpi4py", "torch RPC")
    found = dict(sorted(newest("server", "apart", "compute_ms", "megabytes", "servers", pushing=0).items()))
    head = (
        "cores of their own",
        "computes, ms",
        "MB",
        "servers",
        "ours, ms",
        "bare mpi4py, ms",
        "torch RPC, ms",
        "ours / bare (95 %)",
        "RPC / ours (95 %)",
    )
    body = [
        ("yes" if apart else "", f"{compute_ms:g}", f"{megabytes:g}", str(servers),
         *(f"{row['median_ms'][way]:.2f}" for way in ways),
         spread(row["ours_to_bare"]), spread(row["rpc_to_ours"]))
        for (apart, compute_ms, megabytes, servers), row in found.items()
    ]  # fmt: skip
    idle = [f"{row['idle_core']:.1%}" for row in found.values() if row.get("idle_core")]
    told = f"An idle server took {idle[-1]} of a core.\n\n" if idle else ""
    return table(head, *body) + f"\n\n{told}" + origin(*found.values()) + _server_under_load(ways)


def _server_under_load(ways: tuple[str, ...]) -> str:
    """What a server carries of workers that do nothing but push."""
    every = newest("server", "pushing", "apart", "compute_ms", "megabytes", "servers")
    found = {pushing: row for (pushing, *_), row in sorted(every.items()) if pushing}
    if not found:
        return ""
    head = (
        "workers",
        *(f"{way}, pushes a second" for way in ways),
        *(f"{way}, server's CPU us a push" for way in ways),
    )
    body = [
        (str(pushing), *(f"{row['pushes_per_second'][way]:,.0f}" for way in ways),
         *(f"{row['server_cpu_us'][way]:.0f}" for way in ways))
        for pushing, row in found.items()
    ]  # fmt: skip
    return "\n\n" + table(head, *body) + "\n\n" + origin(*found.values())


def collectives() -> str:
    ratios = ("ratio_to_gloo", "ratio_to_bare", "ratio_to_bound")
    texts = []
    for (hosts, link, _), row in newest("collectives", "hosts", "link", "ranks").items():
        where = f"{row['ranks']} ranks, one host" if hosts == 1 else f"{hosts} emulated hosts, {link}"
        head = (where, "bytes", "mpitrain", "to gloo (95 %)", "to bare mpi4py (95 %)", "to the bound (95 %)")
        body = [
            (each["collective"], size(each["bytes"]), duration(each["median_us"]["mpitrain"]),
             *(spread(each[key]) if key in each else "" for key in ratios))
            for each in row["rows"]
        ]  # fmt: skip
        texts += [table(head, *body), *_beside_the_least(row["rows"]), origin(row)]
    return "\n\n".join(texts)


def loaded() -> str:
    head = ("ranks", "processes beside them", "", "mpitrain, ms", "gloo, ms", "to gloo (95 %)")
    body = [
        (str(ranks), str(busy), name, *(f"{row[f'{key}_ms'][way]:.2f}" for way in ("mpitrain", "gloo")),
         spread(row[f"{key}_ratio_to_gloo"]))
        for (ranks, busy), row in newest("loaded", "ranks", "busy").items()
        for key, name in (("step", "time of a step"), ("cpu", "computed by all ranks"))
    ]  # fmt: skip
    return table(head, *body) + "\n\n" + origin(*newest("loaded", "ranks", "busy").values())


def _beside_the_least(rows: Any) -> Iterator[str]:
    """What the smallest all-reduce takes beside what a group in Python cannot do without."""
    for each in [row for row in rows if "ratio_to_empty_and_bare" in row][:1]:
        yield (
            f"The allreduce of {size(each['bytes'])} takes {spread(each['ratio_to_empty_and_bare'])} times as long as "
            "an all-reduce of a process group in Python that does nothing and bare mpi4py's together; one that calls "
            "the library's blocking Allreduce and sees no signal, no timeout and no rank that calls something else "
            f"{spread(each['unchecked_to_empty_and_bare'])} times."
        )


def push_parts() -> str:
    texts = []
    for (megabytes,), row in newest("push_parts", "megabytes").items():
        parts, total = row["parts_us"], row["total_us"]
        body = [(part, f"{value:.1f}", f"{value / total:.1%}") for part, value in parts.items()]
        told = (
            f"{megabytes:g} MB: the parts add up to {sum(parts.values()):.1f} of {total:.1f} us, over {row['counted']} "
            f"of {row['pushes']} pushes (the others were interrupted). Unwatched a push takes "
            f"{row['unwatched_us']:.1f} us; watching costs {spread(row['watched_to_unwatched'])} times that."
        )
        texts += [table(("part", "us", "share"), *body), told, origin(row)]
    return "\n\n".join(texts)


def after_pause() -> str:
    texts = []
    for (ranks, bound, busy), row in newest("after_pause", "ranks", "bound", "busy").items():
        where = f"{ranks} ranks{', each on a core of its own' if bound else ''}{', a busy machine' if busy else ''}"
        median, high = row["median_us"], row["ninetieth_us"]
        pauses = [*row["num_calls"]]
        names = (f"after {float(at) / 1e3:g} s" if float(at) else "in a row" for at in pauses)
        body = [
            (way, *(f"{median[way][at]:.0f} ({high[way][at]:.0f})" for at in pauses),
             *(f"{median[way][at] / median[way]['0']:.1f}" for at in pauses[-1:]))
            for way in median
        ]  # fmt: skip
        head = (f"{where}: us, median (90th percentile)", *names, "last / in a row")
        texts += [table(head, *body), origin(row)]
    return "\n\n".join(texts)


PROGRAMS: dict[str, Callable[[], str]] = {
    "server": server,
    "push_parts": push_parts,
    "after_pause": after_pause,
    "collectives": collectives,
    "loaded": loaded,
}
