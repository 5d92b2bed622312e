"""What does a step cost beside a checkpoint that is being written, and the writing beside `torch.save`?

    mpitrain launch -n 2 benchmarks/beside_checkpoint.py [--width 8083] [--rounds 3]

Two ranks train one large layer with Adam under `allreduce()`, 784 MB of state, one torch thread each, and write a
checkpoint every few steps. A step counts as beside a checkpoint where rank 0's writer was at work as it began or ended;
the others but for the first ones are steps alone. Runs that copy the state and runs that pause (`--checkpoint-pause`)
take turns; of the latter a pause is what the step with the writing took beyond the median. Then rank 0 saves as much
with `torch.save` and fsync, in turns with the time that the writer itself takes while somebody waits for it.
"""

from __future__ import annotations

import contextlib
import io
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path

import torch
from measuring.common import machine, make_parser, median_ratio, middle_of, table, write_row
from measuring.measurement import TRAINING, Command, Measurement
from torch import nn

import mpitrain as mt
from mpitrain.checkpoint.parts import folder_of, write_part
from mpitrain.mpi.runtime import start
from mpitrain.system.files.run_directory import Identity

MEASUREMENT = Measurement(
    contestants=("the steps of the same run without a checkpoint", "`torch.save` with fsync"),
    wanted="a step beside a checkpoint 1.3 of one alone; a checkpoint 1.1 of `torch.save` with fsync",
    depends=TRAINING,
    keys=("width", "ranks"),
    figures=("step_ratio", "save_ratio", "pause_s"),
    commands=(Command("mpitrain launch -n 2 benchmarks/beside_checkpoint.py", minutes=4),),
)
BATCH, STEPS, EVERY, WARM_UP = 4, 36, 12, 3


class Ones(torch.utils.data.Dataset):
    """Samples of a row of the layer."""

    def __init__(self, width: int):
        self.width = width

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.ones(self.width)}


class Watched:
    """The loss, which notes when it is called and whether the writer is at work."""

    def __init__(self) -> None:
        self.calls: list[tuple[float, bool]] = []

    def __call__(self, module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        writes = any(thread.name == "mpitrain-checkpoint" for thread in threading.enumerate())
        self.calls.append((time.monotonic(), writes))
        return (module(batch["x"]) - 1).square().mean()

    def steps(self) -> tuple[list[float], list[float]]:
        """Seconds of the steps alone, and of those beside a checkpoint."""
        alone, beside = [], []
        for (began_s, before), (ended_s, after) in zip(self.calls[WARM_UP:], self.calls[WARM_UP + 1 :]):
            (beside if before or after else alone).append(ended_s - began_s)
        return alone, beside


def trained(runtime, width: int, folder: Path, pauses: bool):
    """One run; its `Watched`."""
    watched = Watched()
    job = mt.Job(
        model=lambda: nn.Linear(width, width, bias=False), loss=watched, data=Ones(width), epochs=1, batch_size=BATCH,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-4), seed=0,
        checkpoint_every=str(EVERY * BATCH * runtime.size), keep_checkpoints=1,
    )  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        mt.train(job, mt.AllReduce(), run_dir=str(folder), quiet=True, steps=STEPS, checkpoint_pause=pauses)
    return watched


def saved(width: int, folder: Path, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of a part of a checkpoint, and of `torch.save` with fsync, of as many numbers."""
    state = {name: torch.ones(width, width) for name in ("parameters", "first", "second")}
    ours, theirs = [], []
    for number in range(rounds):
        began_s = time.monotonic()
        write_part(
            folder_of(folder / "saved", number + 1), "own-0", state, Identity("run", "start"), (), None
        )
        ours.append(time.monotonic() - began_s)
        began_s = time.monotonic()
        with open(folder / "state.pt", "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        theirs.append(time.monotonic() - began_s)
    return ours, theirs


def main() -> None:
    parser = make_parser(__doc__, MEASUREMENT)
    parser.add_argument(
        "--width", type=int, default=8083, help="of the layer, whose parameters are its square"
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each way, and twice as many saves")
    options = parser.parse_args()
    runtime = start()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(runtime.broadcast(scratch))
        found = {
            pauses: [
                trained(runtime, options.width, folder / f"{number}-{pauses}", pauses).steps()
                for number in range(options.rounds)
            ]
            for pauses in (False, True)
        }
        runtime.barrier()
        if runtime.rank == 0:
            show(options, runtime.size, found, saved(options.width, folder, 2 * options.rounds))
        runtime.barrier()
    runtime.finish()


def show(options, num_ranks: int, found, saves) -> None:
    alone_s, beside_s = ([statistics.median(one[at]) for one in found[False]] for at in (0, 1))
    pauses_s = [max(one[0] + one[1]) - statistics.median(one[0]) for one in found[True]]
    step, save, pause = median_ratio(beside_s, alone_s), median_ratio(*saves), middle_of(pauses_s)
    lines = [("what", "median", "ratio (95 %)")]
    lines += [("step alone", f"{1e3 * statistics.median(alone_s):.0f} ms", "")]
    lines += [
        (
            "step beside a checkpoint",
            f"{1e3 * statistics.median(beside_s):.0f} ms",
            "{:.2f} ({:.2f} - {:.2f})".format(*step),
        )
    ]
    lines += [("longest step where training pauses, beyond one", f"{1e3 * pause[0]:.0f} ms", "")]
    lines += [
        (
            "a checkpoint's part",
            f"{statistics.median(saves[0]):.2f} s",
            "{:.2f} ({:.2f} - {:.2f})".format(*save),
        )
    ]
    lines += [("torch.save and fsync", f"{statistics.median(saves[1]):.2f} s", "")]
    print(f"{machine()['cpu']}, {machine()['num_cores']} cores, one thread a rank\n{table(lines)}")
    write_row("beside_checkpoint", {
        "width": options.width, "ranks": num_ranks, "rounds": options.rounds, "step_ratio": step, "save_ratio": save,
        "pause_s": pause, "alone_s": alone_s, "beside_s": beside_s, "num_beside": [len(one[1]) for one in found[False]],
        "part_s": saves[0], "torch_save_s": saves[1],
    })  # fmt: skip


if __name__ == "__main__":
    main()
