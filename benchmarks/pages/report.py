"""The figures of `benchmarks/README.md`, of the README and of `docs/`, from the rows in `benchmarks/results`.

    make docs      (`python docs/generate.py`: writes everything that is generated)

No figure of the documentation is typed by hand: every function here takes the newest row of its kind, and a test holds
that the committed pages are what this makes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from measuring.common import mean_interval
from measuring.measurement import declared, program_of, question

from docs.markdown import table
from pages import report_gpu, report_growth, report_jobs, report_literature, report_models, report_virtual
from pages.rows import duration, newest, one, origin, rows_of, shown, size, spread

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
    for way in found[(models[0],)]["median_ms"]:
        line = [names.get(way, way)]
        for model in models:
            row = found[(model,)]
            line += [f"{row['median_ms'][way]:.1f}", spread(row["ratio_to_gloo"][way])]
        body.append(line)
    return table(head, *body) + "\n\n" + origin(*found.values())


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


def server() -> str:
    ways = ("ours", "bare mpi4py", "torch RPC")
    found = {key: row for key, row in newest("server", "megabytes", "servers").items() if key[1]}
    head = (
        "MB",
        "servers",
        "ours, ms",
        "bare mpi4py, ms",
        "torch RPC, ms",
        "ours / bare (95 %)",
        "RPC / ours (95 %)",
    )
    body = [
        (f"{megabytes:g}", str(servers), *(f"{row['median_ms'][way]:.2f}" for way in ways),
         spread(row["ours_to_bare"]), spread(row["rpc_to_ours"]))
        for (megabytes, servers), row in found.items()
    ]  # fmt: skip
    last = list(found.values())[-1]
    load, idle = last["load_before"], last["idle_core"]
    load = load if isinstance(load, float) else load[0]  # rows of old have that of 5 and 15 minutes, too
    told = f"The load of the machine before the run was {load:.1f}; an idle server took {idle:.1%} of a core."
    return table(head, *body) + f"\n\n{told}\n\n" + origin(last)


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
    for codec in found[columns[0]]["codecs"]:
        line = [f"`{codec}`"]
        for column in columns:
            codecs = found[column]["codecs"]
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


def whole_reader() -> Row:
    """The newest row of all ways to read."""
    row = [row for row in rows_of("reader") if not row.get("pairs")][-1]
    shown("reader", row)
    return row


def reader() -> str:
    row = whole_reader()
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
    for (load,), pairs in newest("reader", "load_before", pairs=True).items():
        limits = [
            key for key in ("raw", "shuffled") if key in next(iter(pairs["cases"].values()))["mpitrain_over"]
        ]
        text += f"\n\n{', '.join(limits)} and mpitrain alone, by turns, at a load of {load:.1f} on "
        text += f"{pairs['num_cores']} cores. mpitrain over\n\n"
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
    used = [one("chaos", part=part) for part in ("kills", "allreduce", "accuracy", "writing")]
    return chaos_kills() + "\n\n" + "\n".join(lines) + "\n\n" + origin(*used)


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
        "gloo dense / sparse (95 %)",
        "table / sparse, bytes",
    )
    body = [
        (f"{rows:,}", f"{batch} x {row['words']}", *(f"{row['median_ms'][way]:.2f}" for way in row["median_ms"]),
         spread(row["gloo_dense_over"]["sparse"]), f"{row['dense_bytes'] / row['sparse_bytes']:.1f}")
        for (rows, batch), row in sorted(found.items())
    ]  # fmt: skip
    return table(head, *body) + "\n\n" + origin(*found.values())


def tables() -> str:
    found = newest("tables", "rows", "batch", "hidden")
    found = {key: row for key, row in found.items() if "hybrid" in row}
    ways = list(next(iter(found.values()))["median_ms"])
    head = ("rows of 16", "batch", "units of the tower", *(f"{way}, ms" for way in ways),
            "gloo dense / sync (95 %)", "sync / hybrid (95 %)", "pushed, answered / (rows and ids)", "the same, hybrid",
            "table / pushed, bytes")  # fmt: skip
    body = [
        (f"{rows:,}", f"{batch} x {row['words']}", f"{hidden:,}",
         *(f"{row['median_ms'][way]:.2f}" for way in ways), spread(row["gloo_dense_over"]["sync"]),
         spread(row["sync_over_hybrid"]),
         *(f"{of['pushed_bytes'] / of['row_bytes']:.3f}, {of['replied_bytes'] / of['row_bytes']:.3f}"
           for of in (row, row["hybrid"])),
         f"{row['dense_bytes'] / row['pushed_bytes']:.1f}")
        for (rows, batch, hidden), row in sorted(found.items())
    ]  # fmt: skip
    return table(head, *body) + "\n\n" + origin(*found.values())


def search() -> str:
    found = {key: row for key, row in newest("search", "seed").items() if row["ranks"] == 4}
    head = ("seed", "grid's best accuracy", "ASHA's", "points lost", "ASHA's share of the samples", "and of the time",
            "idle ranks: grid", "ASHA")  # fmt: skip
    body = [
        (str(seed), f"{row['grid']['accuracy']:.4f}", f"{row['asha']['accuracy']:.4f}",
         f"{100 * row['accuracy_lost']:.2f}", f"{row['share_of_samples']:.1%}",
         f"{row['asha']['elapsed_s'] / row['grid']['elapsed_s']:.1%}", f"{row['grid']['idle_share']:.1%}",
         f"{row['asha']['idle_share']:.1%}")
        for (seed,), row in sorted(found.items())
    ]  # fmt: skip
    rows = list(found.values())
    rungs = ", ".join(map(str, rows[-1]["asha"]["rungs_epochs"]))
    told = f'`--asha "{rows[-1]["rule"]}"`: rungs of {rungs} epochs.'
    return table(head, *body) + f"\n\n{told}\n\n" + origin(*rows)


ON_HOSTS = ".venv/bin/python benchmarks/measuring/hosts.py run --hosts 4 --rate 100mbit .venv/bin/python"

COMPRESSION_OF_HOSTS = 'benchmarks/compression.py --where "4 hosts, 100 Mbit/s" --ways gloo threshold'


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


# program -> its commands and what is made of its rows
PROGRAMS: dict[str, tuple[Sequence[str], Callable[[], str]]] = {
    "step_time": (["mpitrain launch -n 3 benchmarks/step_time.py"], step_time),
    "gpu": (
        ["mpitrain launch -n 2 benchmarks/gpu.py", "MPITRAIN_GPU_BUFFERS=on mpitrain launch -n 2 benchmarks/gpu.py",
         "mpitrain launch -n 1 benchmarks/gpu.py"],
        report_gpu.gpu,
    ),
    "guard_cost": (["mpitrain launch -n 2 benchmarks/guard_cost.py"], guard_cost),
    "server": (["mpitrain launch -n 7 benchmarks/server.py"], server),
    "collectives": (
        ["mpitrain launch -n 2 benchmarks/collectives.py", "mpitrain launch -n 4 benchmarks/collectives.py",
         f"{ON_HOSTS} benchmarks/collectives.py --sizes 25MB --only allreduce,bf16"],
        collectives,
    ),
    "loaded": (["mpitrain launch -n 2 benchmarks/loaded.py"], loaded),
    "compression": (
        ['mpitrain launch -n 4 benchmarks/compression.py --where "one host"',
         f'{ON_HOSTS} {COMPRESSION_OF_HOSTS}'],
        compression,
    ),
    "codec_cost": (["python benchmarks/codec_cost.py"], codec_cost),
    "codec_accuracy": (["python benchmarks/codec_accuracy.py"], codec_accuracy),
    "sparse": (["mpitrain launch -n 2 benchmarks/sparse.py"], sparse),
    "tables": (["mpitrain launch -n 4 benchmarks/tables.py"], tables),
    "averaging": (["mpitrain launch -n 2 benchmarks/averaging.py"], averaging),
    "splitting": (["mpitrain launch -n 2 benchmarks/splitting.py"], splitting),
    "memory": (["python benchmarks/memory/memory.py"], memory),
    "stragglers": (["mpitrain launch -n 5 benchmarks/stragglers.py"], stragglers),
    "rates": (["python benchmarks/rates.py"], rates),
    "reader": (["python benchmarks/reader.py"], reader),
    "packing": (["mpitrain launch -n 2 benchmarks/packing.py"], packing),
    "chaos": (["make chaos"], chaos),
    "search": (["python benchmarks/search.py"], search),
    "tolerance_cost": (["python benchmarks/tolerance/tolerance_cost.py"], tolerance_cost),
    "signals": (["python benchmarks/signals/signals.py"], signals),
    "slurm_signals": (["python benchmarks/signals/slurm_signals.py"], slurm_signals),
    "threads": (["python benchmarks/threads/threads.py"], threads),
    "other_mpi": (["python benchmarks/other_mpi/other_mpi.py"], other_mpi),
    "hostile": (["make hostile"], hostile),
    **report_growth.PROGRAMS,
    **report_virtual.PROGRAMS,
    **report_models.PROGRAMS,
    **report_jobs.PROGRAMS,
    **report_literature.PROGRAMS,
}  # fmt: skip


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
    for name, (commands, made) in PROGRAMS.items():
        body = made() if rows_of(name) else "No row has been recorded."
        shown(name, *([] if rows_of(name) else [None]))
        texts.append("\n".join([f"## {name}", "", asked(name), "", "```sh", *commands, "```", "", body]))
    return "\n\n".join(texts)


def headlines() -> str:
    """The three ratios of the README, each with the command that measures it."""
    step = one("step_time", model="mlp")["ratio_to_gloo"]["allreduce"]
    slow = one("stragglers", compute="emulated compute")["rules"]["async()"]["ratio_to_sync"]
    read = whole_reader()["cases"]["12 KiB"]["mpitrain_over"]["loader 0"]
    return f"""\
- `mpitrain launch -n 3 benchmarks/step_time.py`: `allreduce()` takes **{spread(step)}**
  of the time per step of torch's DDP over gloo (2 workers, 6.3 million parameters).
- `mpitrain launch -n 5 benchmarks/stragglers.py`: with one of four workers 5 times as slow,
  `async()` trains on **{spread(slow)}** times the samples per second of `sync()`.
- `python benchmarks/reader.py`: shuffled reading is **{spread(read, 0)}** times as fast as torch's
  DataLoader over h5py (samples of 12 KiB, one core)."""


SECTIONS: dict[str, Callable[[], str]] = {
    "benchmarks": programs,
    "headlines": headlines,
    "chaos": chaos_kills,
    "gpu": report_gpu.proven,
}
