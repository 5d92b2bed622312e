"""The sections of `benchmarks/README.md` on trained models: several as one, and in fewer bits."""

from __future__ import annotations

from collections.abc import Callable

from docs.markdown import table
from pages.rows import newest, one, origin, spread


def ensemble() -> str:
    row = one("ensemble")
    head = ("way", "accuracy", "points from the best member (95 %)", "won, lost, equal")
    body = []
    for way, found in row["ways"].items():
        points, low, high = found["points"]
        values = found["accuracy"]
        body.append(
            (
                way,
                f"{100 * sum(values) / len(values):.2f} %",
                f"{points:+.2f} ({low:+.2f} .. {high:+.2f})",
                ", ".join(map(str, found["won_lost_equal"])),
            )
        )
    told = f"{row['rounds']} splits of the digits, the best three of {row['members']} runs of {row['epochs']} epochs."
    return table(head, *body) + f"\n\n{told}\n\n" + origin(row)


def quantisation() -> str:
    found = {key[0]: row for key, row in newest("quantisation", "job").items()}
    head = (
        "job",
        "way",
        "layers",
        "bytes of these",
        "whole file",
        "time of a batch (95 %)",
        "accuracy",
        "points",
    )
    body = []
    for job, row in found.items():
        for way, one_way in row["ways"].items():
            before, after = one_way["accuracy"]
            layers, file = (
                after_ / before_ for before_, after_ in (one_way["layer_bytes"], one_way["file_bytes"])
            )
            body.append(
                (
                    job,
                    f"`{way}`",
                    str(len(one_way["layers"])),
                    f"{layers:.3f}",
                    f"{file:.3f}",
                    spread(one_way["batch_time"]),
                    f"{100 * after:.2f} %",
                    f"{100 * (after - before):+.2f}",
                )
            )
    left = "\n".join(
        f"- {job}: as they were in `int8`: {', '.join(f'`{name}`' for name in row['ways']['int8']['left'])}"
        for job, row in found.items()
    )
    told = (
        "Bytes and times are those of the trained model's. A file of a small model grows by the program in it, and "
        "bytes are\nno faster on a CPU that has to turn them into numbers first."
    )
    return table(head, *body) + f"\n\n{told}\n\n{left}\n\n" + origin(*found.values())


PROGRAMS: dict[str, Callable[[], str]] = {
    "ensemble": ensemble,
    "quantisation": quantisation,
}
