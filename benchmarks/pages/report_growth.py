"""The section of `benchmarks/README.md` on what a rank costs as the number of ranks grows."""

from __future__ import annotations

import math
from collections.abc import Callable

from docs.markdown import table
from pages.rows import Row, one, origin, rows_of, size


def growth() -> str:
    row = one("growth")
    torch, package = (row["launches"][0]["stages"][stage]["others"] for stage in ("torch", "package"))
    told = (
        '"Others" is the largest of them. The start goes from the end of MPI\'s own to the first step. Before it, a '
        f"rank imports torch ({torch['opens']:.0f} files, {torch['cpu_s']:.1f} s of CPU) and the package "
        f"({package['opens']:.0f}, {package['cpu_s']:.1f} s)."
    )
    starts = [
        f"`{start['strategy']}`, {start['ranks']} ranks: from the launch to the first step of the last of them "
        f"{start['first_step_s']:.1f} s, {start['first_step_cpu_s']:.1f} s of CPU in all. As many processes import "
        f"torch in {start['torch_s']:.1f} s, {start['torch_cpu_s']:.1f} s of CPU: the start takes "
        f"{start['first_step_s'] / start['torch_s']:.2f} times as long, and "
        f"{start['first_step_cpu_s'] / start['torch_cpu_s']:.2f} times the CPU. They make one step of Adam, for which "
        f"torch imports its compiler, in {start['torch_step_s']:.1f} s, {start['torch_step_cpu_s']:.1f} s of CPU. What "
        "else the machine did meanwhile shows in the times, and less in the CPU seconds."
        for start in row["starts"]
    ]
    before = (
        '"Before" is what the same machine needs where every rank deals the batches of all, is told what all others '
        "have said, and listens to each worker with a receive of its own."
    )
    counted = "; ".join(
        f"`{run['strategy']}`{', gone on' if run['resumed'] else ''}, {run['ranks']} ranks: "
        f"{run['stages']['end']['rank 0']['messages']:.0f} (formula: {math.ceil(math.log2(run['ranks']))})"
        for run in row["launches"]
    )
    counted = (
        "Rank 0's messages at the end are a formula there, the logarithm of the number of ranks. Counted in the "
        f"launches above, with all that rank 0 sends and receives after its last step: {counted}."
    )
    only = {start["strategy"] for start in row["starts"]}
    parts = [
        stages(row), told, checkpoints(row), *starts, functions(row), counted, before, origin(row), *starts_alone(only),
    ]  # fmt: skip
    return "\n\n".join(parts)


def starts_alone(elsewhere: set[str]) -> list[str]:
    """Starts and imports of torch that have taken turns, where they have been measured apart."""
    if not rows_of("growth_start"):
        return []
    row = one("growth_start")
    missing = sorted(elsewhere - {start["strategy"] for start in row["starts"]})
    left_out = (
        f" (not of {', '.join(f'`{name}`' for name in missing)}, whose ratio stands above)" if missing else ""
    )
    head = (
        "start of",
        "first step, s",
        "CPU s",
        "as many imports of torch, s",
        "CPU s",
        "ratio of s",
        "of CPU s",
    )
    body = [
        (
            f"`{start['strategy']}`, {start['ranks']} ranks",
            *(f"{start[key]:.1f}" for key in ("first_step_s", "first_step_cpu_s", "torch_s", "torch_cpu_s")),
            *(f"{start[f'first_step_{unit}'] / start[f'torch_{unit}']:.2f}" for unit in ("s", "cpu_s")),
        )
        for start in row["starts"]
    ]
    return [
        "With `--starts`, starts and imports take turns" + left_out + ":",
        table(head, *body),
        origin(row),
    ]


def stages(row: Row) -> str:
    head = (
        "run", "ranks", "rank", "MPI's own start, CPU s", "start, CPU s", "files", "bytes", "messages", "step, CPU ms",
        "bytes", "messages", "end, CPU ms", "bytes", "messages",
    )  # fmt: skip
    body = []
    for run in row["launches"]:
        name = f"`{run['strategy']}`" + (", gone on" if run["resumed"] else "")
        for who in ("rank 0", "others"):
            mpi, start, step, end = (run["stages"][stage][who] for stage in ("MPI", "start", "step", "end"))
            body.append((
                name, str(run["ranks"]), who, f"{mpi['cpu_s']:.2f}", f"{start['cpu_s']:.2f}", f"{start['opens']:.0f}",
                size(start["bytes"]), f"{start['messages']:.0f}",
                *(cell for stage in (step, end) for cell in (
                    f"{1e3 * stage['cpu_s']:.1f}", size(stage["bytes"]), f"{stage['messages']:.0f}",
                )),
            ))  # fmt: skip
    return table(head, *body)


def checkpoints(row: Row) -> str:
    head = (
        "a checkpoint of",
        "parts",
        "largest part",
        "its CPU ms",
        "its files",
        "its fsyncs",
        "files of all",
    )
    body = [
        (f"`{run['strategy']}`, {run['ranks']} ranks", str(found["parts"]), size(found["bytes"]),
         f"{1e3 * found['cpu_s']:.1f}", *(str(found[key]) for key in ("opens", "fsyncs", "all_opens")))
        for run in row["launches"] if not run["resumed"] for found in [run["checkpoint"]]
    ]  # fmt: skip
    return table(head, *body)


def functions(row: Row) -> str:
    head = (
        "ranks", "own lease, us", "before", "all of an epoch, s", "position in the data", "to agree, each rank",
        "before", "result, each rank", "before", "messages of rank 0 at the end, by formula", "before",
        "a message completed, us", "before",
    )  # fmt: skip
    body = [
        (f"{of['size']:,}", f"{1e6 * of['lease_s']:.1f}", f"{1e6 * of['lease_before_s']:,.1f}",
         f"{of['leases_of_epoch_s']:.2f}", size(of["position_bytes"]), size(of["agree_bytes"]),
         size(of["agree_before_bytes"]), size(of["end_bytes"]), size(of["end_before_bytes"]), str(of["end_messages"]),
         f"{of['end_before_messages']:,}", f"{1e6 * of['completion_s']:.1f}", f"{1e6 * of['completion_before_s']:.1f}")
        for of in row["functions"]
    ]  # fmt: skip
    return table(head, *body)


def aggregation() -> str:
    row = one("aggregation")
    measured = table(
        ("strategy", "workers", "messages", "bytes", "CPU, ms"),
        *((f"`{run['strategy']}`", str(run["workers"]), f"{run['messages']:.2f}", size(run["bytes"]),
           f"{1e3 * run['cpu_s']:.2f}") for run in row["launches"]),
    )  # fmt: skip
    virtual = table(
        ("strategy", "workers", "nodes", "messages in", "out", "bytes in", "out", "pushes a second",
         "of the server's link"),
        *((f"`{run['strategy']}`", f"{run['workers']:,}", str(run["nodes"]), f"{run['messages_in']:.3f}",
           f"{run['messages_out']:.3f}", size(run["bytes_in"]), size(run["bytes_out"]), f"{run['pushes_per_s']:,.0f}",
           f"{run['link_share']:.0%}" if "link_share" in run else _not_counted(run, row))
          for run in row["virtual"]),
    )  # fmt: skip
    told = (
        f"In virtual time, on nodes of {row['per_node']} ranks behind links of {row['gbit_per_s']:g} Gbit/s, a model "
        f"of {row['numbers']:,} numbers, {row['compute_s']:g} s for a gradient, and memory of "
        f"{row['memory_gb_per_s']:g} GB/s on servers and aggregators, start and end included:"
    )
    first = "For each push, what one server on this machine receives and sends, and its CPU time:"
    return "\n\n".join([first, measured, told, virtual, origin(row)])


def _not_counted(run: Row, row: Row) -> str:
    """What can be said of a row that did not count the bytes on the link apart."""
    carried = run["pushes_per_s"] * max(run["bytes_in"], run["bytes_out"]) * 8e-9
    if carried <= row["gbit_per_s"]:
        return "not counted"
    return f"not counted: {carried:.1f} Gbit/s, of which its own node's workers are a part"


def gathering() -> str:
    row = one("gathering")
    first = row["sizes"][0]["workers"]
    body = [
        (f"{of['workers']:,}", f"{of['push_us']:.1f}", "{:.2f} ({:.2f} to {:.2f})".format(*of["ratio"]),
         f"{of['waiting']:,}")
        for of in row["sizes"]
    ]  # fmt: skip
    head = ("workers", "CPU us a push", f"of that among {first}", "gradients waiting at most")
    return "\n\n".join([table(head, *body), origin(row)])


PROGRAMS: dict[str, Callable[[], str]] = {
    "growth": growth,
    "aggregation": aggregation,
    "gathering": gathering,
}
