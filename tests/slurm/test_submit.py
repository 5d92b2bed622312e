"""What `slurm submit` refuses before anything is queued, and what it queues: with a stand-in for sbatch."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from mpitrain.cli.main import main
from mpitrain.errors import UsageError
from mpitrain.slurm import Script, render, script_parts
from mpitrain.slurm.submit import run_directory
from mpitrain.slurm.sweep_file import array_of, read_sweep

ROOT = Path(__file__).resolve().parents[2]
JOB = """
import mpitrain as mt
import torch
Options = mt.Options("model", hidden=4)
job = mt.Job(
    model=lambda: torch.nn.Linear(2, 2), loss=lambda model, batch: model(batch["x"]).sum(),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), data=mt.Shards("nowhere/train-*.h5"), epochs=1,
    batch_size=2,
)
"""


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to submit from, and the file into which `sbatch` puts what it is given."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sbatch").write_text(f"#!/bin/bash\ncat >{tmp_path}/queued\necho '41;cluster'\n")
    (tmp_path / "bin" / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    for name in (
        "RUN_DIR",
        "RUN_ROOT",
        "SBATCH_GPUS_PER_NODE",
        "WORKERS_PER_NODE",
        "SPARE_NODES",
        "SBATCH_MEM_PER_NODE",
        "SBATCH_MEM_PER_CPU",
    ):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "broken.py").write_text("job = 3 +\n")
    (tmp_path / "good.txt").write_text("# rates\n\n--lr 1e-3\n  --lr 2e-3 --strategy 'async(servers=1)'\n")
    (tmp_path / "option.txt").write_text("--lr 1e-3\n\n--lrr 2e-3\n")
    (tmp_path / "strategy.txt").write_text("--lr 1e-3\n# and\n--strategy 'asink()'\n")
    (tmp_path / "quote.txt").write_text("--lr 1e-3\n--strategy 'async()\n")
    (tmp_path / "comment.txt").write_text("# nothing\n\n")
    return tmp_path / "queued"


REFUSED = {
    "single-node job.py --dry-run": "--dry-run after JOB makes no sense in a batch script",
    "single-node job.py --run-dir x": "--run-dir after JOB.*export RUN_DIR=DIR",
    "single-node job.py --resume other": "--resume after JOB.*--init",
    "single-node job.py --gpus-per-node 2": "--gpus-per-node after JOB.*--set nodes=N",
    "single-node job.py --threads 2": "--threads after JOB.*starts ranks",
    "benchmark job.py --steps 5": "--steps after JOB.*export STEPS=N",
    "single-node job.py --strategy asink()": "unknown name 'asink'.*did you mean 'async'",
    "single-node job.py --strategy backup(spare=4)": "spare",
    "--set nodes=1 tolerant job.py": "nodes=1, 1 of them spare",
    "job.py": "which kind of script.*multi-node job.py",
    "job.py --set nodes=2": "which kind of script.*multi-node job.py",
    "single-node --set nodes=2 job.py": "--set stands behind KIND.*--set ... single-node JOB.py",
    "single-node broken.py": "broken.py, line 1: invalid syntax",
    "single-node absent.py": "no job file 'absent.py'",
    "single-node job.py --lrr 1": "unknown option '--lrr'; did you mean '--lr'",
    "--set sweep=absent.txt array-sweep job.py": "cannot read the sweep absent.txt: No such file",
    "--set sweep=option.txt array-sweep job.py": "unknown option '--lrr'(.|\n)*option.txt, line 3: see above",
    "--set sweep=strategy.txt array-sweep job.py": "strategy.txt, line 3: unknown name 'asink'",
    "--set sweep=quote.txt array-sweep job.py": "quote.txt, line 2: No closing quotation",
    "--set sweep=comment.txt array-sweep job.py": "comment.txt has no line with options",
    "--set sweep=good.txt --set array=0-2 array-sweep job.py": "the sweep has 2 line.s., so 1 is the last index",
    "--set sweep=good.txt array-sweep job.py --epochs 0": "--epochs",
    "multi-node job.py --set nodes=1280": "--set nodes=1280 after JOB.*before KIND: --set nodes=1280 multi-node job.py",
    "--set time=1 single-node job.py": "time='1': nothing can be trained within 60 s, of which the last 30 s",
    "--sbatch n3 single-node job.py": "sbatch option 'n3': an option that goes with a script",
    "--sbatch --wrap=ls single-node job.py": "sbatch option '--wrap=ls'",
    "--sbatch --comment=$HOME single-node job.py": "without quotes, #",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_run_is_refused_before_it_is_queued_or_rendered(
    words: str, queue: Path, capfd: pytest.CaptureFixture
) -> None:
    import re

    for action in ("submit", "render"):
        try:
            code = main(["slurm", action, *words.split()])
        except SystemExit as error:
            code = error.code
        out, told = capfd.readouterr()
        assert code == 2 and re.search(REFUSED[words], told), told
        assert "Traceback" not in told and not queue.exists() and "#SBATCH" not in out


def test_what_is_queued(
    queue: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--sbatch", "--exclude=n3 --comment='two words'", "--set", "gpus_per_node=2"]
    assert main(["slurm", "submit", *words, "multi-node", "job.py", "--resume", "auto", "--epochs", "2"]) == 0
    out, err = capsys.readouterr()
    assert out == "41\n" and "mpitrain slurm status runs/mpitrain-41" in err
    script = Script(
        "multi-node",
        "job.py",
        ("--resume", "auto", "--epochs", "2"),
        gpus_per_node=2,
        sbatch=("--exclude=n3", "--comment=two words"),
    )
    assert queue.read_text() == render(script)
    assert '#SBATCH --exclude=n3 "--comment=two words"\n' in queue.read_text()
    (line,) = Path("runs/mpitrain-41/job.log").read_text().splitlines()
    assert line.split()[1:] == ["41", "0", "submitted"]
    monkeypatch.setenv("RUN_ROOT", "mine")
    assert (
        main(["slurm", "submit", "--set", "sweep=good.txt", "--set", "array=%1", "array-sweep", "job.py"])
        == 0
    )
    assert "#SBATCH --array=0-1%1\n" in queue.read_text() and Path("mine/job.log").exists()
    queue.unlink()
    assert main(["slurm", "submit", "--dry-run", "--set", "sweep=good.txt", "array-sweep", "job.py"]) == 0
    assert "#SBATCH --array=0-1\n" in capsys.readouterr().out and not queue.exists()
    assert (
        main(["slurm", "submit", "--no-check", "single-node", "broken.py"]) == 0
    )  # a login node without torch
    assert queue.exists()


def test_memory_that_the_ranks_of_a_node_do_not_fit_into_is_warned_of(
    queue: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (queue.parent / "large.py").write_text(JOB.replace("Linear(2, 2)", "Linear(4096, 4096)"))  # 1/16 GiB
    monkeypatch.setattr("mpitrain.planning.node_memory.libraries_bytes", lambda: 0.9 * 2**30)
    monkeypatch.setenv("WORKERS_PER_NODE", "2")

    def told(sbatch: str = "", gpus: int = 0) -> str:
        words = ["--set", f"gpus_per_node={gpus}", *(["--sbatch", sbatch] if sbatch else [])]
        words += ["single-node", "large.py", "--strategy", "localsgd(period=2)"]
        assert main(["slurm", "submit", *words]) == 0
        return capsys.readouterr().err

    # two ranks, each of libraries, parameters and gradients: 2 * (0.9 + 1/16 + 1/16) GiB, and a fifth
    need = "the 2 ranks of a node need about 2.1 GiB; with 20 % more: --mem=3G"
    assert f"warning: --mem asks for 2.0 GiB a node, and {need}" in told("--mem=2G")
    assert f"gives the job 3 CPUs or more: {need}" in told("--mem-per-cpu 900M")
    assert not any(
        "of a node need" in told(*one) for one in ((), ("--mem=3G",), ("--mem=0",), ("--mem=2G", 2))
    )
    monkeypatch.setenv("SBATCH_MEM_PER_NODE", "1024")
    assert "asks for 1.0 GiB a node" in told("--mem=3G")


def test_a_refusal_of_sbatch_is_one_line_and_no_traceback(
    queue: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sbatch = queue.parent / "bin" / "sbatch"
    sbatch.write_text("#!/bin/bash\necho 'sbatch: error: invalid partition specified: nope' >&2\nexit 1\n")
    assert main(["slurm", "submit", "single-node", "job.py"]) == 2
    told = capsys.readouterr().err
    assert (
        told
        == "mpitrain: error: sbatch refused the script: sbatch: error: invalid partition specified: nope\n"
    )


def test_both_components_of_a_heterogeneous_job_get_what_sbatch_is_given() -> None:
    first, _, second = render(Script("hetjob", sbatch=("--exclude=n3",))).partition("#SBATCH hetjob\n")
    assert "#SBATCH --exclude=n3\n" in first and "#SBATCH --exclude=n3\n" in second
    with pytest.raises(UsageError, match="the word hetjob"):
        Script("hetjob", sbatch=("--comment=hetjob",))


def test_the_run_directory_is_named_as_the_script_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RUN_DIR", raising=False)
    assert run_directory(Script(name="a"), "7") == Path("runs/a-7")
    assert run_directory(Script(name="a", sbatch=("--hold", "-J", "b")), "7") == Path("runs/b-7")
    assert run_directory(Script(name="a", sbatch=("--job-name=c",)), "7") == Path("runs/c-7")
    monkeypatch.setenv("RUN_DIR", "mine")
    assert run_directory(Script(name="a"), "7") == Path("mine")


LINES = r"""# a comment
--lr 1e-3

   # one more
--strategy 'async(servers=2, placement="beside")' --set "model.name=two words"
	--target "accuracy>0.97" --set model.path=a\ b
"""


def test_script_and_submit_read_the_same_lines_of_a_sweep(tmp_path: Path) -> None:
    """`xargs` in the script, `shlex` here."""
    (tmp_path / "sweep.txt").write_text(LINES)
    lines = read_sweep(tmp_path / "sweep.txt")
    assert [line.number for line in lines] == [2, 5, 6]
    show = "python3 -c 'import json, sys; print(json.dumps(sys.argv[1:]))'"
    text = f'set -euo pipefail\nset -- sweep.txt\n{script_parts.SWEEP_OPTIONS}\n{show} "$@"\n'
    for index in range(4):
        env = {"SLURM_ARRAY_TASK_ID": str(index), "PATH": "/usr/bin:/bin", "RUN_ROOT": "runs"}
        run = subprocess.run(["bash", "-c", text], cwd=tmp_path, env=env, capture_output=True, text=True)
        if index < 3:
            assert tuple(json.loads(run.stdout)) == lines[index].words, run
        else:
            assert run.returncode == 2 and "no line for index 3: sbatch --array=0-2" in run.stderr


def test_indices_of_a_sweep() -> None:
    assert array_of(None, 5) == "0-4" and array_of(None, 1) == "0" and array_of("%2", 5) == "0-4%2"
    assert array_of("0,3-4%8", 5) == "0,3-4%8" and array_of("0-4:2", 5) == "0-4:2"
    for wrong in ("5", "1,7", "0-9%2", "a", "1-", "-3"):
        with pytest.raises(UsageError, match="array="):
            array_of(wrong, 5)
