"""The figures of `benchmarks/README.md`, of the README and of `docs/`, from the rows in `benchmarks/results`.

    make docs      (`python docs/generate.py`: writes everything that is generated)

No figure of the documentation is typed by hand: every function here shows the rows that `rows.py` chooses, and a test
holds that the committed pages are what this makes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any

from measuring.common import mean_interval
from measuring.measurement import declared, program_of, question

from docs.markdown import table
from pages import (
    report_gpu,
    report_growth,
    report_jobs,
    report_literature,
    report_memory,
    report_messages,
    report_models,
    report_opponents,
    report_virtual,
)
from pages.rows import all_rows, newest, one, origin, rows_of, settings_of, shown, size, spread

Row = dict[str, Any]


def step_time() -> str:
    found = newest("step_time", "model")
    models = [key[0] for key in found]
    head = ["one training step, 2 workers"]
    for model in models:
        head += [f"{model}, ms", "ratio to gloo (95 %)"]
    names = {
        "gloo": "torch's DDP over gloo",
        "allreduce": "`allreduce()`",
        "async": "`async()`, server on a third rank",
    }
    body = []
    for way in max((row["median_ms"] for row in found.values()), key=len):
        line = [names.get(way, way)]
        for model in models:
            row = found[(model,)]
            known = way in row["median_ms"]
            line += [f"{row['median_ms'][way]:.1f}", spread(row["ratio_to_gloo"][way])] if known else ["", ""]
        body.append(line)
    over = [
        f"{model}: `allreduce()` over {bound} {spread(ratio)}"
        for (model,), row in found.items()
        for bound, ratio in row["allreduce_over"].items()
    ]
    return table(head, *body) + f"\n\n{'; '.join(over)}.\n\n" + origin(*found.values())


def guard_cost() -> str:
    found = newest("guard_cost", "model")
    head = (
        "one training step, 2 workers", "tensors", "plain, ms", "guarded / plain (95 %)", "again / plain (95 %)",
        "a comparison, ms",
    )  # fmt: skip
    body = []
    for (model,), row in found.items():
        times, ratios = row["median_ms"], row["ratio_to_plain"]
        body.append(
            [model, str(row["tensors"]), f"{times['plain']:.1f}", spread(ratios["guarded"]), spread(ratios["again"]),
             f"{times['comparison']:.2f}"]
        )  # fmt: skip
    loads = ", ".join(f"{row['load_before']:.1f}" for row in found.values())
    told = (
        f"`again` is a second model without a guard. Load of the machine's 2 cores before the run: {loads}."
    )
    return table(head, *body) + "\n\n" + told + "\n\n" + origin(*found.values())


def compression() -> str:
    found = newest("compression", "where")
    places = [key[0] for key in found]
    ways = max((row["ways"] for row in found.values()), key=len)
    head = ("way", "message", *(f"{place}: speed-up over gloo (95 %)" for place in places), "pays below")
    body = []
    for way in ways:
        ran = [row["ways"].get(way) for row in found.values()]
        some = next(each for each in reversed(ran) if each)
        below = some["break_even_bits_per_s"]
        body.append(
            (f"`{way}()`" if not way.startswith("gloo") else f"torch's DDP over {way}",
             size(some["message_bytes"]) if some["message_bytes"] else "",
             *(spread(each["speedup"]) if each else "" for each in ran),
             f"{below / 1e9:.2g} Gbit/s" if below else "")
        )  # fmt: skip
    return table(head, *body) + "\n\n" + origin(*found.values())


def codec_cost() -> str:
    row = one("codec_cost")
    head = ("codec", "encode, ms", "decode, ms", "message")
    body = [
        (
            f"`{name}()`",
            f"{found['encode_ms']:.0f}",
            f"{found['decode_ms']:.0f}",
            size(found["message_bytes"]),
        )
        for name, found in row["codecs"].items()
    ]
    told = f"{row['numbers'] / 1e6:.0f} million numbers, one core; a pass over them takes {row['pass_ms']:.0f} ms."
    return table(head, *body) + f"\n\n{told}\n\n" + origin(row)


def codec_accuracy() -> str:
    found = newest("codec_accuracy", "task")
    head, columns = ["codec"], list(found)
    for (task,) in columns:
        head += [f"{task}: points from dense (95 %)", "times fewer bytes"]
    body = []
    for codec in dict.fromkeys(codec for row in found.values() for codec in row["codecs"]):
        line = [f"`{codec}`"]
        for column in columns:
            codecs = found[column]["codecs"]
            if codec not in codecs:
                line += ["", ""]
                continue
            pairs = zip(codecs[codec]["accuracies"], codecs["none"]["accuracies"], strict=True)
            points = [100 * (ours - dense) for ours, dense in pairs]
            low, high = mean_interval(points)
            fewer = codecs["none"]["message_bytes"] / codecs[codec]["message_bytes"]
            line += [f"{statistics.mean(points):+.2f} ({low:+.2f} .. {high:+.2f})", f"{fewer:.1f}"]
        body.append(line)
    seeds = found[columns[0]]["seeds"]
    return table(head, *body) + f"\n\n{seeds} seeds, four workers.\n\n" + origin(*found.values())


def averaging() -> str:
    found = newest("averaging", "model", "where", "ranks")
    head = (
        "way",
        *(
            f"{model}, {ranks} ranks, {where}: times the steps of `allreduce()` (95 %)"
            for model, where, ranks in found
        ),
    )
    ways = next(iter(found.values()))["ways"]
    body = [(f"`{way}`", *(spread(row["ways"][way]["speedup"]) for row in found.values())) for way in ways]
    return table(head, *body) + "\n\n" + origin(*found.values())


def splitting() -> str:
    row = one("splitting")
    head = ("way", "samples/s", "ratio to one process (95 %)", "idle by stage", "bubble")
    body = [
        (way, f"{found['samples_per_second']:.0f}", spread(found["ratio"]),
         " ".join(f"{share:.0%}" for share in found["idle_share"]), f"{found['bubble']:.0%}" if found["bubble"] else "")
        for way, found in row["ways"].items()
    ]  # fmt: skip
    told = f"`jobs/charnn.py`, {row['num_parameters'] / 1e6:.1f} million parameters, 2 ranks. "
    told += "**Splitting does not pay where the model fits.**"
    return table(head, *body) + f"\n\n{told}\n\n" + origin(row)


def reader() -> str:
    row = one("reader", pairs=False)
    others = ("raw", "shuffled", "loader 0", "loader 2", "loader 4", "rows", "WebDataset")
    names = (
        "raw h5py",
        "raw, shuffled",
        *(f"DataLoader, {count} workers" for count in (0, 2, 4)),
        "contiguous file",
        "WebDataset",
    )
    head = ("bytes a sample", "samples/s", *(f"ratio to {name}" for name in names))
    body = []
    for title, case in row["cases"].items():
        over = case["mpitrain_over"]
        ratios = [f"{over[key][0]:.3g}" if key in over else "" for key in others[2:]]
        limits = [spread(over[key]) if key in over else "" for key in others[:2]]
        body.append((title, f"{case['samples_per_second']['mpitrain']:,.0f}", *limits, *ratios))
    text = table(head, *body) + "\n\n"
    for title, found in row["computing_20_ms"].items():
        text += f"- Samples of {title}: a consumer that computes 20 ms a batch takes {spread(found['ratio'], 3)} times "
        text += "as long a step as on one batch in memory.\n"
    text += "\n" + origin(row)
    for (megabytes,), pairs in newest("reader", "megabytes", pairs=True).items():
        limits = [
            key for key in ("raw", "shuffled") if key in next(iter(pairs["cases"].values()))["mpitrain_over"]
        ]
        text += f"\n\n{', '.join(limits)} and mpitrain alone, by turns, on {megabytes} MiB, at a load of "
        text += f"{pairs['load_before']:.1f} on {pairs['num_cores']} cores. mpitrain over\n\n"
        for key in limits:
            found = (
                f"{title} {spread(case['mpitrain_over'][key])}" for title, case in pairs["cases"].items()
            )
            text += f"- {key}: {', '.join(found)}.\n"
        text += "\n"
        text += origin(pairs)
    return text


def stragglers() -> str:
    texts = []
    for (compute,), row in newest("stragglers", "compute").items():
        head = (compute, "samples/s", "ratio to `sync()` (95 %)", "to the target", "mean staleness")
        body = []
        for rule, found in row["rules"].items():
            stale = statistics.median(run.get("staleness_mean", 0.0) for run in found["runs"])
            name = rule if rule.startswith("torch") else f"`{rule}`"
            body.append(
                (
                    name,
                    f"{found['samples_per_second']:.0f}",
                    spread(found["ratio_to_sync"]),
                    f"{found['to_target_s']:.1f} s",
                    f"{stale:.2f}",
                )
            )
        texts += [table(head, *body), origin(row)]
    return "\n\n".join(texts)


def rates() -> str:
    found = newest("rates", "speeds", "workers")
    texts = []
    for (speeds, workers), row in found.items():
        head = (
            f"{workers} workers, {speeds} speeds",
            "best rate",
            "final loss (range)",
            "best rate",
            "samples (range)",
            "highest rate tried",
        )
        body = []
        for way in row["ways"].values():
            line = [f"`{way['strategy']}`"]
            for aim, digits in (("loss", ".3f"), ("samples", ",.0f")):
                judged = way[aim]
                low, high = judged["range"] if judged else (0, 0)
                line += (
                    [f"{judged['rate']:g}", f"{judged['median']:{digits}} ({low:{digits}} - {high:{digits}})"]
                    if judged
                    else ["", "missed"]
                )
            last = way["sweep"][-1]
            right = max(run["accuracy"] for run in last["runs"])
            body.append([*line, f"{last['rate']:g}: at most {right:.0%} right"])
        goal = row["goal"]
        told = f"{row['seeds']} seeds, {row['epochs']} epochs, batches of {row['batch']}; samples until "
        told += f"{goal['accuracy']:.0%} at {goal['marks']} marks in a row."
        left = "".join(f" Not measured: {text}." for text in row.get("left_out", ()))
        texts += [table(head, *body), told + left, origin(row)]
    return "\n\n".join(texts)


def chaos_kills() -> str:
    """Kills in the middle of messages: the table that docs/fault-tolerance.md shows too."""
    what = {"kills": "five of six workers of `async()`", "allreduce": "three of five ranks of `allreduce()`"}
    head = ("what is killed", "message", "kills survived", "wrong", "seen after p50, p99", "longest pause")
    body = []
    for part, name in what.items():
        for (num_bytes, transport), row in newest("chaos", "message_bytes", "transport", part=part).items():
            wrong = row["wrong"] if "wrong" in row else row["phantom_or_torn"]
            body.append(
                (name, f"{size(num_bytes)}, {transport}",
                 f"{row['kills_in_jobs_that_survived']} of {row['kills']}", str(wrong),
                 f"{row['detected_p50_s']:.2f}, {row['detected_p99_s']:.2f} s", f"{row['longest_pause_s']:.2f} s")
            )  # fmt: skip
    return table(head, *body)


def chaos() -> str:
    lines = []
    for (strategy, virtual), row in newest("chaos", "strategy", "virtual", part="accuracy").items():
        pooled = row["pooled"]
        lines.append(
            f"- Accuracy of digits, `{strategy or 'async()'}`{', virtual time' if virtual else ''}: "
            f"one of four workers killed a third of the way {pooled['killed']:.2f} %, "
            f"undisturbed {pooled['undisturbed']:.2f} % ({row['seeds']} seeds)."
        )
    for part, what in (
        ("writing", "killed while a checkpoint was written"),
        ("server", "whose server was killed"),
    ):
        row = one("chaos", part=part)
        lines.append(
            f"- Jobs {what}: {row['right']} of {row['jobs']} were started again and ended with the right bits; "
            f"they trained again after at most {row['longest_to_resume_s']:.1f} s."
        )
    row = one("chaos", part="signal")
    lines.append(
        f"- SIGUSR1 to the launch: {row['right']} of {row['jobs']} right, ended after at most "
        f"{row['longest_to_end_s']:.1f} s."
    )
    row = one("chaos", part="files")
    lines.append(
        f"- Writers of checkpoints killed: {row['whole']} of {row['kills']} whole; damage seen: "
        f"{row['seen']} of {row['damages']}."
    )
    row = one("chaos", part="stop")
    lines.append(f"- One of four workers stopped for 10 s: the others kept {row['ratio']:.2f} of their rate.")
    for row in (
        *newest("chaos", part="counting").values(),
        *newest("chaos", "drawn by", part="counting by level").values(),
    ):
        numbers = {key: value for key, value in row.items() if isinstance(value, int) and key != "num_cores"}
        lines.append(
            (
                "- Every sample counted: "
                if row["part"] == "counting"
                else "- The same by ULFM, heartbeat, plain, threads: "
            )
            + ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in numbers.items())
            + "."
        )
    return (
        chaos_kills()
        + "\n\n"
        + "\n".join(lines)
        + "\n\n"
        + origin(*(each.row for each in settings_of("chaos")))
    )


def tolerance_cost() -> str:
    found = newest("tolerance_cost", "strategy", "model", "transport", part="ulfm")
    head = ("`--ft ulfm`", "model", "plain, ms", "ulfm, ms", "ratio (95 %)", "under 3 %")
    body = [
        (f"`{strategy}`", model, *(f"{row['median_ms'][level]:.1f}" for level in ("plain", "ulfm")),
         spread(row["ratio"], 3), row["under_limit"])
        for (strategy, model, _), row in found.items()
    ]  # fmt: skip
    written = newest("tolerance_cost", "strategy", part="checkpoints")
    second = ("one checkpoint a minute", "bytes", "one takes", "share of the time (95 %)", "under 5 %")
    rest = []
    for (strategy,), row in written.items():
        middle, low, high = (f"{100 * value:.2f}" for value in row["share_of_a_minute"])
        rest.append(
            (
                f"`{strategy}`",
                size(row["num_bytes"]),
                f"{row['write_s']:.2f} s",
                f"{middle} % ({low} - {high})",
                row["under_limit"],
            )
        )
    return (
        table(head, *body)
        + "\n\n"
        + table(second, *rest)
        + "\n\n"
        + origin(*found.values(), *written.values())
    )


def signals() -> str:
    row = one("signals")
    names = ", ".join(dict.fromkeys(run["signal"] for run in row["rows"]))
    return (
        f"{names}: {row['as_told']} of {row['launches']} launches ended as the table of docs/fault-tolerance.md says, "
        f"{row['hung']} hung; the longest took {row['longest_to_end_s']:.0f} s to end.\n\n" + origin(row)
    )


def slurm_signals() -> str:
    rows = newest("slurm_signals", "event")
    ends = [end for row in rows.values() for end in row["ends"]]
    lines = ["| what happens | strategy | newest checkpoint before it | goes on from, or ended at | right |"]
    lines += ["|---|---|---|---|---|"]
    for end in ends:
        right = "yes" if end["right"] else "**no**"
        cells = (end["event"], f"`{end['strategy']}`", f"{end['before']:,}", f"{end['after']:,}", right)
        lines.append(f"| {' | '.join(cells)} |")
    right = sum(end["right"] for end in ends)
    copied = [row["event"] for row in rows.values() if "transcribed" in row]
    note = (
        f"Copied from what the program printed, not written by it: {'; '.join(copied)}.\n\n" if copied else ""
    )
    return (
        "\n".join(lines) + f"\n\nIn samples; {right} of {len(ends)} right.\n\n{note}" + origin(*rows.values())
    )


def node_outage() -> str:
    found = newest("node_outage", "strategy")
    head = ("strategy", "nodes killed", "survived", "outage, median s", "longest s")
    body = [
        (
            f"`{name}`",
            str(row["kills"]),
            str(row["survived"]),
            f"{row['median_s']:.2f}",
            f"{row['longest_s']:.2f}",
        )
        for (name,), row in found.items()
    ]
    return table(head, *body) + "\n\n" + origin(*found.values())


def hostile() -> str:
    row = one("hostile")
    return (
        f"{row['cases']:,} cases, {row['failed']} failed; the largest took {row['peak_mib']} MiB of memory, "
        f"of {row['bound_mib']} allowed.\n\n" + origin(row)
    )


def packing() -> str:
    row = one("packing")
    head = ("way", "MiB/s", "times a copy's time (95 %)")
    body = [
        (way, f"{found['mebibytes_per_second']:.0f}", spread(found["of_copy"]))
        for way, found in row["ways"].items()
    ]
    return table(head, *body) + "\n\n" + origin(row)


def sparse() -> str:
    found = newest("sparse", "rows", "batch")
    head = (
        "rows of 16",
        "batch",
        "alone, ms",
        "gloo dense, ms",
        "gloo sparse, ms",
        "dense, ms",
        "sparse, ms",
        "gloo sparse / sparse",
        "gloo dense / sparse (95 %)",
        "table / sparse, bytes",
    )
    body = [
        (f"{rows:,}", f"{batch} x {row['words']}", *(f"{row['median_ms'][way]:.2f}" for way in row["median_ms"]),
         f"{row['median_ms']['gloo sparse'] / row['median_ms']['sparse']:.2f}",
         spread(row["gloo_dense_over"]["sparse"]), f"{row['dense_bytes'] / row['sparse_bytes']:.1f}")
        for (rows, batch), row in sorted(found.items())
    ]  # fmt: skip
    return table(head, *body) + "\n\n" + origin(*found.values())


def tables() -> str:
    found = newest("tables", "rows", "batch", "hidden")
    ways = max((list(row["median_ms"]) for row in found.values()), key=len)
    head = ("rows of 16", "batch", "units of the tower", *(f"{way}, ms" for way in ways),
            "gloo dense / sync (95 %)", "sync / hybrid (95 %)", "pushed, answered / (rows and ids)", "the same, hybrid",
            "table / pushed, bytes")  # fmt: skip
    body = [
        (f"{rows:,}", f"{batch} x {row['words']}", f"{hidden:,}" if hidden else "an earlier tower",
         *(f"{row['median_ms'][way]:.2f}" if way in row["median_ms"] else "" for way in ways),
         spread(row["gloo_dense_over"]["sync"]),
         spread(row["sync_over_hybrid"]) if "hybrid" in row else "",
         *(f"{of['pushed_bytes'] / of['row_bytes']:.3f}, {of['replied_bytes'] / of['row_bytes']:.3f}" if of else ""
           for of in (row, row.get("hybrid"))),
         f"{row['dense_bytes'] / row['pushed_bytes']:.1f}")
        for (rows, batch, hidden), row in sorted(found.items())
    ]  # fmt: skip
    return table(head, *body) + "\n\n" + origin(*found.values())


def search() -> str:
    found = newest("search", "rule", "seed")
    head = ("rule", "rungs, epochs", "seed",
            "grid's best accuracy", "ASHA's", "points lost", "ASHA's share of the samples", "and of the time",
            "idle ranks: grid", "ASHA")  # fmt: skip
    body = [
        (f"`{rule}`", ", ".join(map(str, row["asha"]["rungs_epochs"])), str(seed),
         f"{row['grid']['accuracy']:.4f}", f"{row['asha']['accuracy']:.4f}",
         f"{100 * row['accuracy_lost']:.2f}", f"{row['share_of_samples']:.1%}",
         f"{row['asha']['elapsed_s'] / row['grid']['elapsed_s']:.1%}", f"{row['grid']['idle_share']:.1%}",
         f"{row['asha']['idle_share']:.1%}")
        for (rule, seed), row in sorted(found.items())
    ]  # fmt: skip
    return table(head, *body) + "\n\n" + origin(*found.values())


def threads() -> str:
    found = newest("threads", "model")
    head = (
        "`async()`, 2 replicas",
        "MPI, ms",
        "threads, ms",
        "two processes, ms",
        "threads / MPI (95 %)",
        "lock (95 %)",
    )
    body = [
        (model, *(f"{row['median_ms'][way]:.1f}" for way in ("MPI", "threads", "two processes")),
         spread(row["over_mpi"]), spread(row["lock"]))
        for (model,), row in found.items()
    ]  # fmt: skip
    loads = ", ".join(f"{row['load']:.0f}" for row in found.values())
    told = (
        f"Milliseconds of a step. Load of the machine besides: up to {loads} processes that wanted its cores."
    )
    return table(head, *body) + "\n\n" + told + "\n\n" + origin(*found.values())


def other_mpi() -> str:
    found = newest("other_mpi", "other", "ranks", "grouped_by_session")
    head = (
        "other MPI",
        "ranks",
        "cores are shared",
        "question",
        "Open MPI",
        "the other",
        "the other's speed / Open MPI's (95 %)",
    )
    body = []
    for (name, ranks, by_session), row in found.items():
        sharing = "among sessions" if by_session else "among ranks"
        for asked, ratio in row["ratio"].items():
            unit = "samples/s" if asked in ("allreduce()", "64 KB pushes") else "us"
            middle = [statistics.median(row["figures"][who][asked]) for who in ("own", "other")]
            figures = (f"{value:.0f} {unit}" for value in middle)
            body.append((" ".join(name.split()), str(ranks), sharing, asked, *figures, spread(ratio)))
    return table(head, *body) + "\n\n" + origin(*found.values())


PROGRAMS: dict[str, Callable[[], str]] = {
    "step_time": step_time,
    "gpu": report_gpu.gpu,
    "guard_cost": guard_cost,
    **report_messages.PROGRAMS,
    "compression": compression,
    "codec_cost": codec_cost,
    "codec_accuracy": codec_accuracy,
    "sparse": sparse,
    "tables": tables,
    "averaging": averaging,
    "splitting": splitting,
    "stragglers": stragglers,
    "rates": rates,
    "reader": reader,
    "packing": packing,
    "chaos": chaos,
    "search": search,
    "tolerance_cost": tolerance_cost,
    "signals": signals,
    "slurm_signals": slurm_signals,
    "node_outage": node_outage,
    "threads": threads,
    "other_mpi": other_mpi,
    "hostile": hostile,
    **report_growth.PROGRAMS,
    **report_memory.PROGRAMS,
    **report_virtual.PROGRAMS,
    **report_models.PROGRAMS,
    **report_jobs.PROGRAMS,
    **report_literature.PROGRAMS,
    **report_opponents.PROGRAMS,
}


def asked(name: str) -> str:
    """What a program asks, and what it declares to stand beside its figure."""
    told, found = question(program_of(name)), declared(program_of(name))
    beside = {
        "Beside it": ", ".join(found.contestants),
        "The bound": found.bound,
        "Wanted beforehand": found.wanted,
    }
    said = " ".join(f"{word}: {text}." for word, text in beside.items() if text)
    return "\n\n".join(filter(None, (told, said)))


def programs() -> str:
    """A section for each program."""
    texts = []
    for name, made in PROGRAMS.items():
        found = declared(program_of(name))
        commands = [command.line for command in found.commands] or list(found.campaign)
        body = made() if rows_of(name) else "No row has been recorded."
        shown(name, *([] if rows_of(name) else [None]))
        parts = [f"## {name}", asked(name), "\n".join(["```sh", *commands, "```"]), body, all_rows(name)]
        texts.append("\n\n".join(filter(None, parts)))
    return "\n\n".join(texts)


def strongest(found: dict[str, float], opponents: Iterable[str]) -> str:
    """Of these opponents the one with the smallest of our ratios over them, or of their times."""
    return min((name for name in opponents if name in found), key=lambda name: found[name])


def headlines() -> str:
    """The three ratios of the README, each with its command, against the strongest opponent that was measured."""
    step, row = one("step_time", model="mlp"), one("reader", pairs=False)
    times = step["median_ms"]
    best = strongest(times, ("gloo", "bare mpi4py"))
    names = {"gloo": "DDP over gloo", "bare mpi4py": "a loop with mpi4py's Allreduce"}
    ratio = {"gloo": spread(step["ratio_to_gloo"]["allreduce"]),
             "bare mpi4py": f"{times['allreduce'] / times['bare mpi4py']:.2f}"}  # fmt: skip
    beside = ", ".join(f"{text} of {names[way]}'s" for way, text in ratio.items() if way != best)
    slow = {
        compute: one("stragglers", compute=f"{compute} compute")["rules"] for compute in ("real", "emulated")
    }
    peer = strongest(
        {name: -rule["samples_per_second"] for name, rule in slow["real"].items()},
        ("sync()", "torch DDP over gloo"),
    )
    real, emulated = (_over(rules, "async()", peer) for rules in slow.values())
    over = row["cases"]["12 KiB"]["mpitrain_over"]
    reader_of = {"rows": "h5py of contiguous rows", "WebDataset": "WebDataset"} | {
        f"loader {num}": f"DataLoader over h5py, {num} workers" for num in (0, 2, 4)
    }
    fastest = strongest({name: ratio[0] for name, ratio in over.items()}, reader_of)
    return f"""\
- `mpitrain launch -n 3 benchmarks/step_time.py`: a step of `allreduce()`, 2 workers, takes
  **{ratio[best]}** of the time of {names[best]}, {beside}.
- `mpitrain launch -n 5 benchmarks/stragglers.py`: one of 4 workers 5 times as slow, `async()` makes
  **{real}** times the samples/s of {_code(peer)}; emulated by sleeps {emulated}.
- `python benchmarks/reader.py`: shuffled samples of 12 KiB come **{spread(over[fastest], 0)}** times
  as fast as by {reader_of[fastest]}; {_least(row)}."""


def _over(rules: Row, ours: str, peer: str) -> str:
    """The ratio of samples a second, with its interval where it was measured in pairs."""
    if peer == "sync()":
        return spread(rules[ours]["ratio_to_sync"])
    return f"{rules[ours]['samples_per_second'] / rules[peer]['samples_per_second']:.2f}"


def _code(peer: str) -> str:
    return f"`{peer}`" if peer.endswith(")") else peer


def _least(row: Row) -> str:
    """The case of the reader in which the strongest opponent comes closest."""
    found = [
        (ratio[0], title, name)
        for title, case in row["cases"].items()
        for name, ratio in case["mpitrain_over"].items()
        if name not in ("raw", "shuffled")
    ]
    ratio, title, _ = min(found)
    return f"{ratio:.1f} times where they are {title.partition(' KiB ')[2] or title}"


SECTIONS: dict[str, Callable[[], str]] = {
    "benchmarks": programs,
    "headlines": headlines,
    "chaos": chaos_kills,
    "gpu": report_gpu.proven,
}
