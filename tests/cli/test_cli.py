"""The command: light, 80 columns, nearest-word answers, exit codes, and options that arrive."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from mpitrain import errors
from mpitrain.cli import main as cli

COMMANDS = [
    [],
    ["launch"],
    ["train"],
    ["sweep"],
    ["runs", "table"],
    ["runs", "best"],
    ["simulate"],
    ["plan"],
    ["bench"],
    ["predict"],
    ["ensemble"],
    ["export"],
    ["report"],
    ["compare"],
    ["data"],
    ["data", "pack"],
    ["data", "check"],
    ["data", "stage"],
    ["data", "info"],
    ["slurm", "render"],
    ["slurm", "submit"],
    ["slurm", "init"],
    ["slurm", "site"],
    ["slurm", "status"],
    ["slurm", "may-requeue"],
    ["doctor"],
    ["examples"],
    ["completion"],
    ["env"],
]
IDS = ["mpitrain", *(" ".join(words) for words in COMMANDS[1:])]


def run(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mpitrain", *words]
    return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=120)


# ---- light


@pytest.mark.parametrize("words", COMMANDS, ids=IDS)
def test_help_imports_nothing_beyond_the_standard_library(words: list[str]) -> None:
    code = f"""
import sys
before = set(sys.modules)  # what this environment's own start-up files import is not ours
from mpitrain.cli.main import main
try:
    main({[*words, "--help"]!r})
except SystemExit as end:
    assert end.code == 0
tops = {{name.split(".")[0] for name in set(sys.modules) - before}}
print("IMPORTED", *sorted(tops - sys.stdlib_module_names - {{"mpitrain"}}))
print("OWN", *sorted(name for name in sys.modules if name.startswith("mpitrain")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    imported, own = done.stdout.splitlines()[-2:]
    assert imported == "IMPORTED"
    heavy = {
        f"mpitrain.{name}"
        for name in ("job.job", "rules", "roles", "model", "training", "virtual", "mpi.runtime")
    }
    assert not heavy & set(own.split())


@pytest.mark.parametrize("words", [["train", "x.py", "--epoch", "3"], ["trian"], ["--version"], []])
def test_a_wrong_word_is_answered_without_torch(words: list[str]) -> None:
    code = f"""
import sys
from mpitrain.cli.main import main
try:
    main({words!r})
except SystemExit:
    pass
print(*sorted({{"torch", "mpi4py", "h5py", "numpy", "sklearn"}} & set(sys.modules)), "end")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1].split() == ["end"], done.stderr


# ---- help


@pytest.mark.parametrize("words", COMMANDS, ids=IDS)
def test_help_fits_80_columns_and_a_wide_terminal_changes_nothing(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for columns in ("40", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        with pytest.raises(SystemExit, match="0"):
            cli.main([*words, "--help"])
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert [line for line in texts[0].splitlines() if len(line) > 80] == []


@pytest.mark.parametrize("words", COMMANDS, ids=IDS)
def test_every_example_in_the_help_parses(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    import shlex

    with pytest.raises(SystemExit):
        cli.main([*words, "--help"])
    text = re.sub(
        r" *\\\n *", " ", capsys.readouterr().out
    )  # all of an example that goes on in the next line
    examples = text.partition("examples:\n")[2].splitlines()
    if words != ["data"]:  # whose examples are its subcommands'
        assert examples
    for line in examples:
        if not line.startswith("  "):
            break
        line = re.sub(
            r"\s{4,}.*| > .*", "", line.strip()
        )  # a remark after the example, or where it prints to
        typed = shlex.split(line)
        inner = typed[typed.index("mpitrain") + 1 :]
        arguments = cli.parse(inner)
        assert arguments.command == inner[0]
        if inner[0] == "launch" and arguments.program[0] in ("train", "env"):
            cli.parse(arguments.program)


def test_help_names_every_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    text = capsys.readouterr().out
    codes = {value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    assert set(map(int, re.findall(r"(?:^|  )(\d+) [a-z]", text.partition("exit codes:")[2], re.M))) == codes


def test_version_is_the_packages() -> None:
    from mpitrain import __version__

    assert run("--version").stdout == f"mpitrain {__version__}\n"


# ---- wrong words


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["trian"],
            "slurm, doctor, examples, completion, env; did you mean 'train'?",
        ),
        (
            ["brew"],
            "no 'brew' among launch, train, sweep, runs, ",
        ),
        (
            ["train", "x.py", "--epoch", "3"],
            "mpitrain train: error: unknown option '--epoch'; did you mean '--epochs'?",
        ),
        (["train", "x.py", "--startegy=async()"], "unknown option '--startegy'; did you mean '--strategy'?"),
        (
            ["train", "x.py", "--zzz"],
            "unknown option '--zzz'; a parameter that the job file declares is given as --set",
        ),
        (["report", "x", "--zzz"], "unknown option '--zzz'\n"),
        (["train", "x.py", "--resume"], "--resume: expected one argument, FROM (auto: go on from the newest"),
        (["launch", "-n"], "-n: expected one argument, N (number of ranks)"),
        (["train", "x.py", "y.py"], "unexpected argument 'y.py'"),
        (["train"], "required: JOB"),
        ([], "required: COMMAND"),
        (["train", "x.py", "--epochs", "0"], "--epochs: '0' is not a whole number of at least 1"),
        (["train", "x.py", "--batch-size", "1.5"], "--batch-size: '1.5' is not a whole number of at least 1"),
        (["train", "x.py", "--seed", "-1"], "--seed: '-1' is not a whole number of at least 0"),
        (["train", "x.py", "--lr", "nan"], "--lr: 'nan' is not a finite number of at least 0"),
        (["train", "x.py", "--clip-norm", "0"], "--clip-norm: '0' is not a finite number greater than 0"),
        (
            ["train", "x.py", "--clip-value", "inf"],
            "--clip-value: 'inf' is not a finite number greater than 0",
        ),
        (["train", "x.py", "--lr", "fast"], "--lr: 'fast' is not a finite number of at least 0"),
        (["train", "x.py", "--ranks", "4"], "--ranks describes a --dry-run"),
        (
            ["train", "x.py", "--dry-run", "--ranks", "2", "--nodes", "3"],
            "2 rank(s) cannot be on more than 2 node(s)",
        ),
        (["simulate", "x.py", "--worker", "3"], "unknown option '--worker'; did you mean '--workers'?"),
        (
            ["data", "pakc", "digits", "d"],
            "no 'pakc' among pack, stage, unstage, check, info; did you mean 'pack'?",
        ),
        (
            ["data", "pack", "digits", "d", "--valdate", "1"],
            "mpitrain data pack: error: unknown option '--valdate'",
        ),
    ],
)
def test_a_wrong_word_gets_the_nearest_right_one(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    captured = capsys.readouterr()
    assert end.value.code == 2 and message in captured.err and captured.out == ""
    assert captured.err.count("\n") == 2 and "--help" in captured.err.splitlines()[1]


@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID"])
def test_of_many_ranks_only_rank_0_says_so(
    variable: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = []
    for rank in range(3):
        monkeypatch.setenv(variable, str(rank))
        with pytest.raises(SystemExit) as end:
            cli.main(["trian"])
        assert end.value.code == 2
        said.append(capsys.readouterr().err != "")
    assert said == [True, False, False]


# ---- what the subcommands hand over


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Stand-ins for the three modules that do the work; the list holds what they were called with."""
    seen: list[tuple[Any, ...]] = []

    def stand_in(module: str, function: str) -> None:
        double = types.ModuleType(module)

        def record(*values: Any, settings: tuple[str, ...] = (), threads: int | None = None) -> int:
            seen.append((function, *values, *settings, *([f"{threads} threads"] if threads else [])))
            return 3

        setattr(double, function, record)
        double.signals = types.SimpleNamespace(install_early=lambda: None)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module, double)

    stand_in("mpitrain.training", "train_command")
    stand_in("mpitrain.planning.dry_run", "dry_run_command")
    return seen


FIELDS = [
    "--strategy",
    "async()",
    "--epochs",
    "2",
    "--batch-size",
    "8",
    "--lr",
    "0.5",
    "--clip-norm",
    "1.5",
    "--clip-value",
    "0.25",
    "--seed",
    "0",
    "--steps",
    "9",
]
ALL_OPTIONS = [*FIELDS, "--run-dir", "r", "--synthetic", "--quiet"]


def test_train_hands_every_option_over(calls: list[tuple[Any, ...]]) -> None:
    from mpitrain.job import Overrides

    assert cli.main(["train", "j.py", *ALL_OPTIONS]) == 3
    everything = Overrides(
        strategy="async()",
        epochs=2,
        batch_size=8,
        lr=0.5,
        clip_norm=1.5,
        clip_value=0.25,
        seed=0,
        run_dir="r",
        synthetic=True,
        steps=9,
        quiet=True,
    )
    assert calls == [("train_command", "j.py", everything)]
    calls.clear()
    cli.main(["train", "j.py"])
    cli.main(["train", "j.py", "--threads", "3"])
    assert calls == [
        ("train_command", "j.py", Overrides()),
        ("train_command", "j.py", Overrides(), "3 threads"),
    ]


@pytest.mark.parametrize(
    ("words", "environ", "ranks", "nodes"),
    [
        ([], {}, 4, 1),
        (["--ranks", "64", "--nodes", "8"], {}, 64, 8),
        ([], {"OMPI_COMM_WORLD_SIZE": "6", "OMPI_COMM_WORLD_RANK": "0"}, 6, 1),
        ([], {"SLURM_NTASKS": "16", "SLURM_JOB_NUM_NODES": "2"}, 16, 2),
        (["--ranks", "3"], {"SLURM_NTASKS": "16", "SLURM_JOB_NUM_NODES": "2"}, 3, 2),
    ],
)
def test_a_dry_run_has_the_ranks_asked_for_or_launched_or_four(
    words: list[str],
    environ: dict[str, str],
    ranks: int,
    nodes: int,
    calls: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["train", "j.py", "--dry-run", *words]) == 3
    assert [(call[0], *call[3:]) for call in calls] == [("dry_run_command", ranks, nodes)]


def test_a_dry_run_under_mpirun_is_printed_once(
    calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    assert cli.main(["train", "j.py", "--dry-run"]) == 0 and calls == []


def test_launching_a_dry_run_starts_no_ranks(calls: list[tuple[Any, ...]]) -> None:
    assert cli.main(["launch", "-n", "7", "train", "j.py", "--dry-run"]) == 3
    assert [(call[0], *call[3:]) for call in calls] == [("dry_run_command", 7, 1)]


def test_simulate_hands_everything_over(monkeypatch: pytest.MonkeyPatch) -> None:
    from mpitrain.job import Overrides
    from mpitrain.simulation import command
    from mpitrain.simulation.command import Request

    asked: list[Request] = []

    def record(request: Request) -> int:
        asked.append(request)
        return 3

    monkeypatch.setattr(command, "simulate_command", record)

    options = [word for word in ALL_OPTIONS if word != "--synthetic"]
    law = ["--workers", "16", "--compute", "exponential(2)", "--network", "link()"]
    assert cli.main(["simulate", "j.py", *options, *law]) == 3
    everything = Overrides(
        epochs=2,
        batch_size=8,
        lr=0.5,
        clip_norm=1.5,
        clip_value=0.25,
        seed=0,
        run_dir="r",
        steps=9,
        quiet=True,
    )
    one = Request("j.py", everything, (16,), ["async()"], "exponential(2)", "link()", settings=[])
    assert asked == [one] and not one.compares
    asked.clear()
    more = ["--workers", "4,8", "--strategy", "sync()", "--strategy", "async()", "--costs", "costs(read_s=1)"]
    cli.main(["simulate", "j.py", *more, "--timing-only", "--json", "a.json", "--html", "a.html"])
    assert asked == [
        Request(
            "j.py", Overrides(), (4, 8), ["sync()", "async()"], costs="costs(read_s=1)", timing_only=True,
            json="a.json", html="a.html", settings=[],
        )
    ]  # fmt: skip


def test_a_simulation_shows_an_error_of_the_jobs_own_from_the_job_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job.py"
    job.write_text(
        "from tests import toy\ndef loss(model, batch):\n    return model(batch['x'].view(-1, 7)).mean()\n"
        "job = toy.make_job(loss=loss)\n"
    )
    words = ["--strategy", "async()", "--workers", "2", "--quiet", "--run-dir", str(tmp_path / "run")]
    assert cli.main(["simulate", str(job), *words]) == 1
    told = capsys.readouterr().err.splitlines()
    assert told[0].startswith("Traceback") and told[1].endswith("line 3, in loss"), told
    assert told[-1].startswith("mpitrain: RuntimeError: ") and not any("/mpitrain/" in line for line in told)


def test_the_default_laws_exist() -> None:
    import mpitrain.virtual  # noqa: F401 - registers them
    from mpitrain.values import parse

    arguments = cli.parse(["simulate", "j.py"])
    assert str(parse(arguments.compute, "compute")) == "constant()"
    assert str(parse(arguments.network, "network")) == "ideal()"


# ---- how a command may fail


def fail_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> int:
    def command(*_: Any, **_named: Any) -> int:
        raise error

    double = types.ModuleType("mpitrain.training")
    double.train_command = command  # type: ignore[attr-defined]
    double.signals = types.SimpleNamespace(install_early=lambda: None)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mpitrain.training", double)
    return cli.main(["train", "j.py"])


def test_a_users_mistake_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fail_with(errors.DataError("shard 3 is cut off"), monkeypatch) == 2
    assert capsys.readouterr().err == "mpitrain: error: shard 3 is cut off\n"


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "missing.py", "--json"],
        ["simulate", "missing.py", "--json"],
        ["simulate", "missing.py", "--html"],
        ["report", "missing", "--out"],
        ["doctor", "--collect", "missing", "--hosts", "n1", "--failing"],
    ],
    ids=lambda words: words[0] + words[-1],
)
def test_a_file_that_cannot_be_written_is_refused_before_any_work(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "no" / "such"
    assert cli.main([*words, str(out)]) == 2
    said = f"{words[-1]} {out}: there is no directory {out.parent}; make it, or name another file"
    assert capsys.readouterr().err == f"mpitrain: error: {said}\n"


def test_another_deliberate_error_says_where_it_came_from(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PMI_RANK", "2")
    assert fail_with(errors.WireError("bad checksum"), monkeypatch) == 1
    err = capsys.readouterr().err
    assert err.startswith("Traceback") and err.endswith("\nmpitrain: error: rank 2: bad checksum\n")


def test_what_rank_0_has_reported_is_not_said_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fail_with(errors.AgreedError("already said", exit_code=75), monkeypatch) == 75
    assert capsys.readouterr().err == ""


def test_a_bug_keeps_its_traceback_for_the_runtimes_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError):
        fail_with(ZeroDivisionError(), monkeypatch)


def test_an_interrupt_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fail_with(KeyboardInterrupt(), monkeypatch) == 130
    assert capsys.readouterr().err == "mpitrain: interrupted\n"


# ---- mpitrain env


def test_env_prints_what_env_json_holds_and_no_secret() -> None:
    done = run("env", SOME_TOKEN="hunter2", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert "hunter2" not in done.stdout
    assert facts["packages"]["torch"] and facts["gpus"] is not None
    assert "library" in facts["mpi"] and facts["mpi"]["thread_level"] == "serialized", facts["mpi"]
    assert set(facts["mpi"]["gpu_aware"]) == {"verdict", "why"}


def test_env_is_printed_where_mpi_cannot_start(tmp_path: Path) -> None:
    done = run("env", MPI4PY_LIBMPI=str(tmp_path / "no-such-library.so"))
    facts = json.loads(done.stdout)
    assert (
        done.returncode == 0
        and "MPI does not start here" in facts["mpi"]["error"]
        and facts["packages"]["torch"]
    )


def test_env_under_a_launcher_is_printed_once_with_every_ranks_node() -> None:
    from mpitrain.launch.discover import find_launcher

    try:
        find_launcher()
    except errors.UsageError as error:
        pytest.skip(str(error))
    done = run("launch", "-n", "2", "env")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["mpi"]["size"] == 2 and facts["mpi"]["nodes"] == [0, 0]
