"""`mpitrain ensemble`: the best of several runs as one model."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from mpitrain.cli.common.options import asked, command, option, switch
from mpitrain.cli.common.ranks import with_ranks
from mpitrain.system.number_texts import natural, positive
from mpitrain.system.saying import say

if TYPE_CHECKING:
    from mpitrain.training.ensembles.ensemble import Ensembled

_DESCRIPTION = """\
Make one model of several finished runs, measure it beside its members on the
job's validation data, and save it as a directory that `mpitrain predict`,
`mpitrain export` and mt.load read. Runs are named, or chosen: those of the best
three settings of a directory of runs, or of the best --top K; a setting's runs,
which differ in seed and fold alone, stay together. With `mpitrain launch` the
members are divided over the ranks, and each computes its own."""

_EPILOG = """\
Members that were chosen on the data they are measured on look better than they
are: give --test for samples that no choice has seen.

examples:
  mpitrain ensemble runs/a runs/b runs/c -o ensembles/abc
  mpitrain ensemble runs/sweep --by "<validation_loss" --weights metric -o best
  mpitrain launch -n 3 ensemble runs/a runs/b runs/c -o ensembles/abc
  mpitrain ensemble runs/fine-* --soup greedy -o soup
  mpitrain predict ensembles/abc "data/digits/validate-*.h5" -o predicted.h5"""

_WIDTH, _NAME = 80, 30


def add_parser(commands: Any) -> None:
    """Add `ensemble` to the command's subparsers."""
    parser = command(
        commands, "ensemble", "make one model of several runs", run_ensemble, _DESCRIPTION, _EPILOG
    )
    option(parser, "run_dirs", "RUN_DIR", "of a finished run, or a directory that holds runs", nargs="+")
    option(parser, "-o --out", "DIR", "the directory to write", required=True)
    switch(parser, "--overwrite", "replace DIR if it holds an ensemble")
    option(
        parser, "--top", "K",
        "take the best K settings by validation metric, each with all of its seeds and folds (default: all runs "
        "that are named, 3 settings of a directory of runs)",
        positive,
    )  # fmt: skip
    option(
        parser, "--by", "METRIC",
        'the metric, such as accuracy, "<loss" (less is better) or ">score" (default: the job\'s keep_best, or '
        "its first target)",
    )  # fmt: skip
    option(parser, "--which", "NAME", "which of a run's models: last (default), best or ema", default="last")
    option(
        parser, "--combine", "HOW",
        "probabilities (their mean; default where the loss takes logits), outputs (the mean of what models "
        "return) or votes",
    )  # fmt: skip
    option(
        parser, "--class-dim", "N",
        "dimension of the models' answer that holds classes (default: found by the loss)",
        natural,
    )  # fmt: skip
    option(
        parser, "--weights", "HOW",
        "equal (default), metric (by each member's), or numbers such as 0.5,0.3,0.2",
        _weights, "equal",
    )  # fmt: skip
    option(
        parser, "--soup", "KIND",
        "average the models' weights instead: uniform, or greedy (a model joins if the metric gets no worse)",
    )  # fmt: skip
    _add_sources(parser)
    option(parser, "--json", "FILE", "write all figures")


def _add_sources(parser: argparse.ArgumentParser) -> None:
    option(parser, "--data", "DATA", "shards to measure on (default: the job's validation data)")
    option(
        parser, "--test", "PATTERN",
        "shards that nothing is chosen by, to measure the result and its best member on (default: --test of the "
        "first run, or test= of its job)",
    )  # fmt: skip
    option(parser, "--job", "JOB", "job file, where the runs' own has moved")


def _weights(text: str) -> str | list[float]:
    if text in ("equal", "metric"):
        return text
    try:
        return [float(one) for one in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither equal nor metric nor numbers with commas between them"
        ) from None


@with_ranks
def run_ensemble(arguments: argparse.Namespace, ranks: Any) -> None:
    """Make it; rank 0 prints how it does beside its members."""
    from pathlib import Path

    from mpitrain.reporting.console import Console
    from mpitrain.reporting.report import write_json
    from mpitrain.system.files.atomic import check_output
    from mpitrain.training.agree import attempt
    from mpitrain.training.ensembles.ensemble import EnsembleOptions, ensemble

    console = Console(sys.stderr, quiet=ranks.rank != 0)
    attempt(ranks, lambda: check_output(arguments.json, "--json") if ranks.rank == 0 else None)
    options = asked(EnsembleOptions, arguments)
    try:
        done = ensemble(
            arguments.run_dirs, arguments.out, options, ranks=ranks,
            note=lambda text: console.progress(text, None, None),
        )  # fmt: skip
    finally:
        console.clear()
    if ranks.rank == 0:
        if arguments.json:
            write_json(Path(arguments.json), done.record())
        say(_text(done, ranks.size))


def _text(done: Ensembled, num_ranks: int) -> str:
    """What there is to say, in 80 columns but for long paths."""
    what = {"probabilities": "mean of probabilities", "outputs": "mean of outputs", "votes": "votes"}
    how = what.get(done.combine, f"mean of the weights of {len(done.used)}")
    ranks = f", {num_ranks} ranks" if num_ranks > 1 else ""
    lines = [f"{done.kind} of {len(done.members)}: {how}; {done.num_samples:,} samples{ranks}", ""]
    names, best = list(done.metrics), next(one for one in done.members if one.name == done.best)
    rows = [
        (("* " if one.name == done.best else "  ") + one.name, f"{one.weight:.3f}", one.metrics)
        for one in done.members
    ]
    rows.append((f"  {done.kind}", "", done.metrics))
    while names:
        shown = [names.pop(0)]
        while names and _NAME + 8 + sum(max(12, len(one) + 2) for one in [*shown, names[0]]) <= _WIDTH:
            shown.append(names.pop(0))
        widths = [max(12, len(one) + 2) for one in shown]
        heads = "".join(f"{one:>{width}}" for one, width in zip(shown, widths, strict=True))
        lines.append(f"{'':<{_NAME}}{'weight':>8}{heads}")
        for name, weight, metrics in rows:
            cells = "".join(f"{metrics[one]:>{width}.6g}" for one, width in zip(shown, widths, strict=True))
            lines.append(f"{_cut(name, _NAME - 1):<{_NAME}}{weight:>8}{cells}")
        gains = (done.metrics[one] - best.metrics[one] for one in shown)
        cells = "".join(f"{gain:>+{width}.3g}" for gain, width in zip(gains, widths, strict=True))
        lines += [f"{'  beside the best member (*)':<{_NAME}}{'':>8}{cells}", ""]
    for name, why in done.passed_over.items():
        lines.append(f"passed over: {name}: {why}")
    if len(done.used) < len(done.members):
        lines.append(f"ingredients: {', '.join(done.used)}")
    lines.append(_verdict(done, best.metrics[done.by]))
    for name, metrics in done.held_out.items():
        figures = ", ".join(
            f"{one} {metrics[one]:.6g}" for one in dict.fromkeys([done.by, *metrics]) if one in metrics
        )
        lines.append(f"held out: {name}: {figures}")
    return "\n".join([*lines, f"written to {done.path}"])


def _verdict(done: Ensembled, best: float) -> str:
    value = done.metrics[done.by]
    if done.is_better[done.by]:
        return f"it beats its best member: {done.by} {value:.6g} against {best:.6g}"
    same = "it does as its best member does" if value == best else "it does not beat its best member"
    return f"{same}: {done.by} {value:.6g} against {best:.6g}"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else "..." + text[3 - width :]
