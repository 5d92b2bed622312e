"""Does training go on, whatever is killed when? `make chaos` counts it.

    python benchmarks/chaos/chaos.py [--kills 100] [--jobs 20] [--parts PART ...] [--record]

`--kills` is the size of the campaign; what other parts do is a share of it, unless it is said.

kills     jobs of six workers over one server, `mpitrain launch --ft ulfm`, of which five are killed at random instants
          around their push (SIGKILL from a thread, in the middle of a message more often than not); messages of 1 and
          20 MB, over shared memory and over TCP. Every update of the job is known beforehand (`chaos_job.py`), so the
          final weights tell whether one was phantom or torn. A job that hangs is ended by its watchdog and relaunched.
allreduce jobs of five ranks in lockstep, of which three are killed in the middle of an allreduce: the rest must end
          with the same bits and every sample counted once (`chaos_allreduce.py`).
files     a process that writes checkpoints is killed at 50 random instants: what is then the newest must be whole; and
          200 random bit flips and truncations of the newest must be seen, and the one before be taken.
writing   20 jobs without ULFM, `allreduce()` and `async(servers=1)` in turn, of which a rank is killed while a
          checkpoint is written: each must be relaunched from a complete one and end as if nothing had happened
          (`chaos_relaunch.py`).
server    4 jobs whose server is killed, with and without ULFM: how soon all ranks are gone, and the same.
signal    4 jobs asked to end by SIGUSR1 to the launcher: how soon they have, with exit code 75, and that the next
          launch goes on from there exactly.
stop      one of four workers is stopped (SIGSTOP) for 10 s: the others' rate of batches meanwhile over before.
counting  launches of every strategy, with and without ULFM, of which one to three ranks, servers included, are killed
          from outside at any moment, start-up included: every sample counted (`chaos_counting.py`). With `--levels`
          of the strategies with servers alone, two or three of them, started in each of these ways in turn.
accuracy  digits (`mpitrain data pack digits data/digits`) with one of four workers killed a third of the way, against
          undisturbed, both pooled over the seeds; over MPI, or in virtual time with `--virtual`.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
from chaos_allreduce import run_allreduce
from chaos_counting import LEVELS, run_counting
from chaos_kills import run_kills
from chaos_relaunch import run_server, run_signal, run_writing
from measuring.common import make_parser, write_row
from measuring.launching import finish, launch, notes
from measuring.measurement import LAUNCHED, ROOT, Measurement

from mpitrain.checkpoint.parts import folder_of, newest, read_part, write_part
from mpitrain.system.files.run_directory import Identity

HERE = Path(__file__).resolve().parent
MEASUREMENT = Measurement(
    wanted="no update lost, torn or counted twice, and no launch that hangs",
    depends=(*LAUNCHED, "jobs/digits.py"),
    keys=("part", "message_bytes", "transport", "strategy", "virtual", "drawn by"),
    figures=("kills_in_jobs_that_survived", "right", "hung"),
    campaign=("make chaos",),
)

OURS = Identity("chaos", "files")
BATCH_SIZE = 16  # the digits job's


def run_files(kills: int, damages: int, seed: int) -> None:
    """Kills while a checkpoint is written, and damage afterwards."""
    draw, whole, seen = random.Random(seed), 0, 0
    for _ in range(kills):
        with tempfile.TemporaryDirectory() as scratch:
            child = os.fork()
            if child == 0:
                write_for_ever(Path(scratch))
            while newest_mark(Path(scratch)) is None:
                time.sleep(0.001)
            time.sleep(draw.uniform(0.0, 0.2))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            found = newest(Path(scratch))
            assert found is not None
            whole += all(
                bool((read_part(found.folder, part)["weight"] == found.checkpoint_at).all())
                for part in found.parts
            )
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(damages):
            shutil.rmtree(scratch)
            for mark in (1, 2):
                write_both(Path(scratch), mark, 10_000)
            victim = draw.choice(sorted(folder_of(Path(scratch), 2).iterdir()))
            data = bytearray(victim.read_bytes())
            if number % 2:
                data = data[: draw.randrange(len(data))]
            else:
                data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            victim.write_bytes(data)
            found = newest(Path(scratch))
            seen += found is not None and found.checkpoint_at == 1 and len(found.refused) == 1
        Path(scratch).mkdir(exist_ok=True)
    print(
        f"killed while writing: {whole} of {kills} whole; damaged: {seen} of {damages} seen, the one before taken"
    )
    write_row("chaos", {"part": "files", "kills": kills, "whole": whole, "damages": damages, "seen": seen})


def newest_mark(run_dir: Path) -> int | None:
    """Of what is complete in `run_dir`."""
    try:
        found = newest(run_dir)
    except Exception:  # the first is being written
        return None
    return found.checkpoint_at if found else None


def write_both(run_dir: Path, mark: int, size: int) -> None:
    """A checkpoint of two parts, whose numbers say which one it is."""
    weight = torch.full((size,), float(mark))
    write_part(folder_of(run_dir, mark), "worker-0", {"weight": weight}, OURS)
    write_part(
        folder_of(run_dir, mark),
        "shard-0",
        {"weight": weight},
        OURS,
        ("shard-0", "worker-0"),
        {"of": "chaos"},
    )


def write_for_ever(run_dir: Path) -> None:
    """In a child that will be killed."""
    mark = 0
    while True:
        mark += 1
        write_both(run_dir, mark, 500_000)
        shutil.rmtree(folder_of(run_dir, mark - 2), ignore_errors=True)


def run_stop(seconds: float = 10.0) -> None:
    """The others' batches a second while one of four workers is stopped, over those before."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        env = {
            "CHAOS_BYTES": "100000",
            "CHAOS_DIR": str(folder),
            "CHAOS_SAMPLES": "6000",
            "CHAOS_SLEEP_S": "0.02",
        }
        words = ["--strategy", "async()", "--inject", "stop(worker=2,at_step=500)"]
        process = launch(folder, 5, HERE / "chaos_job.py", words, "", env)
        while not notes(folder, "killed") and process.poll() is None:
            time.sleep(0.05)
        (stopped,) = notes(folder, "killed")
        time.sleep(seconds)
        os.kill(stopped["pid"], signal.SIGCONT)
        ended = finish(process)
        result = json.loads((folder / "result.json").read_text())
        at_s = stopped["at_s"]
        batches = [one["at_s"] for one in notes(folder, "pause") if one["rank"] != stopped["rank"]]
    before = sum(at_s - seconds < one <= at_s for one in batches) / seconds
    meanwhile = sum(at_s < one <= at_s + seconds for one in batches) / seconds
    print(
        f"batches/s of the other three: {before:.1f} before, {meanwhile:.1f} meanwhile ({meanwhile / before:.2f})"
    )
    row = {"ended": ended, "status": result["status"], "lost": result["lost"], "samples": result["samples"]}
    write_row(
        "chaos",
        {"part": "stop", "before": before, "meanwhile": meanwhile, "ratio": meanwhile / before, **row},
    )


def digits(folder: Path, strategy: str, words: list[str], virtual: bool) -> dict[str, Any]:
    """Train the digits job on four workers, over MPI or in virtual time."""
    job = ROOT / "jobs" / "digits.py"
    words = ["--strategy", strategy, *words]
    if virtual:
        command = [sys.executable, "-m", "mpitrain", "simulate", str(job), "--workers", "4", "--quiet"]
        subprocess.run([*command, "--run-dir", str(folder), *words], cwd=ROOT, stdout=subprocess.DEVNULL)
    else:
        assert finish(launch(folder, 4 + strategy.startswith("async"), job, words, "", {}))
    return json.loads((folder / "result.json").read_text())


def run_accuracy(strategy: str, num_seeds: int, virtual: bool) -> None:
    """Pooled accuracy of digits on four workers, one of which is killed after a third of its batches, or none."""
    right: dict[str, list[float]] = {"undisturbed": [], "killed": []}
    samples: dict[str, list[int]] = {"undisturbed": [], "killed": []}
    with tempfile.TemporaryDirectory() as scratch:
        for seed in range(num_seeds):
            for name in right:
                words = ["--seed", str(seed)]
                if name == "killed":
                    a_third = samples["undisturbed"][-1] // BATCH_SIZE // 4 // 3
                    words += ["--inject", f"kill(worker={1 + seed % 3},at_step={a_third})"]
                result = digits(Path(scratch) / f"{name}-{seed}", strategy, words, virtual)
                right[name].append(result["metrics"]["accuracy"])
                samples[name].append(result["samples"])
                assert (len(result["lost"]) > 0) == (name == "killed"), result["lost"]
                print(
                    strategy,
                    name,
                    seed,
                    result["metrics"]["accuracy"],
                    result["samples"],
                    result["lost"],
                    flush=True,
                )
    pooled = {name: 100 * sum(values) / len(values) for name, values in right.items()}
    difference = pooled["killed"] - pooled["undisturbed"]
    print(
        f"{strategy}: accuracy over {num_seeds} seeds: {pooled}, {difference:+.2f} points; the same samples: "
        f"{samples['killed'] == samples['undisturbed']}"
    )
    found = {
        "strategy": strategy,
        "seeds": num_seeds,
        "virtual": virtual,
        "accuracy": right,
        "pooled": pooled,
        "samples": samples,
    }
    write_row("chaos", {"part": "accuracy", **found, "difference_points": difference})


def main() -> None:
    """Parse the command line and run the parts asked for."""
    parser = make_parser(__doc__, MEASUREMENT)
    parser.add_argument(
        "--kills", type=int, default=100, help="of ranks, over sizes and transports; the size of the campaign"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, help="of the accuracy part (default: kills / 20)")
    parser.add_argument("--virtual", action="store_true", help="the accuracy part in virtual time")
    parser.add_argument(
        "--jobs",
        type=int,
        help="of the writing part (default: kills / 5); a fifth as many of the server part",
    )
    parser.add_argument("--launches", type=int, help="of the counting part (default: kills)")
    parser.add_argument("--levels", nargs="+", choices=LEVELS, default=(), help="of the counting part")
    every = ["files", "writing", "server", "signal", "stop", "counting", "accuracy", "kills", "allreduce"]
    parser.add_argument("--parts", nargs="+", choices=every, default=every)
    options = parser.parse_args()
    jobs = options.jobs or max(1, options.kills // 5)
    launches = options.launches or options.kills
    seeds = options.seeds or max(1, options.kills // 20)
    torch.set_num_threads(1)  # a forked child would wait for threads that it has not got
    if "files" in options.parts:
        run_files(max(1, options.kills // 2), 2 * options.kills, options.seed)
    if "writing" in options.parts:
        run_writing(jobs, options.seed)
    if "server" in options.parts:
        run_server(max(2, jobs // 5), options.seed)
    if "signal" in options.parts:
        run_signal(max(2, jobs // 5))
    if "stop" in options.parts:
        run_stop()
    if "counting" in options.parts:
        run_counting(launches, options.seed, options.levels)
    if "accuracy" in options.parts:
        for strategy in ("async()",) if options.virtual else ("async()", "allreduce()"):
            run_accuracy(strategy, seeds, options.virtual)
    if "kills" in options.parts:
        run_kills(options.kills, options.seed)
    if "allreduce" in options.parts:
        run_allreduce(options.kills, options.seed)


if __name__ == "__main__":
    main()
