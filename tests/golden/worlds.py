"""Golden runs as they are carried out: virtual time and threads in processes of their own, MPI in a launch for each
number of ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

import mpitrain as mt
from mpitrain.checkpoint.parts import FOLDER, listed
from mpitrain.errors import AgreedError, UsageError
from mpitrain.strategies.base import Strategy
from mpitrain.values import parse
from tests.golden.digests import parts_of, text_digest
from tests.golden.runs import FRESH, MPI, RECORDED, REPLAYED, THREADS, VIRTUAL, Run, make_job
from tests.mpi.cases import launch_program
from tests.ranks import RanksHung, Result

Parts = dict[str, str]
OUTCOME = "refused.json"  # in the folder of a run that is refused
REPLAYED_FILES = ("arrivals-*.json", "run.json", "result.json", "model.safetensors")


class Folders:
    """Where runs lie, and what is kept of them beside the recording."""

    def __init__(self, runs: Path, kept: Path, recording: bool):
        self.runs, self.kept, self.recording = runs, kept, recording

    def of(self, key: str) -> Path:
        """The folder of a run."""
        return self.runs / _short(key)

    def kept_of(self, key: str) -> Path:
        """What is kept of it."""
        return self.kept / _short(key)

    def source(self, run: Run) -> Path:
        """Where a run finds what it goes on from, or repeats."""
        return self.of(run.of) if self.recording or not begins_with_kept(run) else self.kept_of(run.of)


def begins_with_kept(run: Run) -> bool:
    """Whether a comparison begins it with what lies beside the recording."""
    return run.course == RECORDED or is_replay(run)


def is_replay(run: Run) -> bool:
    """Whether it repeats an order of arrival."""
    return run.course.startswith(REPLAYED)


def _short(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def train(run: Run, source: str, folder: str) -> None:
    """The run itself, on this rank of it; a refusal is left in its folder."""
    strategy = parse(run.text, "strategy")
    assert isinstance(strategy, Strategy)
    options: dict[str, Any] = {"run_dir": folder, "quiet": True}
    try:
        job = make_job(run.feature)
        if is_replay(run):
            mt.simulate(job, strategy, replay=source, **options)
        elif run.world == VIRTUAL:
            mt.simulate(job, strategy, run.workers, **options)
        else:
            options |= {"resume": "auto"} if source else {}
            options |= {"threads": run.workers} if run.world == THREADS else {}
            mt.train(job, strategy, **options)
    except (AgreedError, UsageError) as error:
        if error.exit_code != 2:
            raise
        words = " ".join(str(error).split()).rpartition("UsageError: ")[2]
        words = words.replace(folder, "RUN").replace(source or folder, "SOURCE")
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / OUTCOME).write_text(json.dumps(words))


def lay_checkpoint(source: Path, folder: Path) -> bool:
    """Copy one from the middle of a run to where another goes on from it; whether there is one."""
    complete = [one for one in sorted(listed(source)) if (one / "shard-0.json").is_file()]
    if not complete:
        return False
    chosen = complete[(len(complete) - 1) // 2]
    shutil.copytree(chosen, folder / FOLDER / chosen.name)
    return True


def outcome(run: Run, folder: Path) -> Parts:
    """What is recorded of a run that has come to its end."""
    if (folder / OUTCOME).is_file():
        return {"refused": text_digest(json.loads((folder / OUTCOME).read_text()))}
    if run.course == FRESH:
        return {"repeated to the bit": str(_is_repeated(run, folder))}
    return parts_of(folder, run.world == VIRTUAL)


def _is_repeated(run: Run, folder: Path) -> bool:
    """Whether a run whose order was left to chance comes out the same in virtual time."""
    strategy = parse(run.text, "strategy")
    assert isinstance(strategy, Strategy)
    with contextlib.redirect_stdout(io.StringIO()):
        again = mt.simulate(
            make_job(run.feature), strategy, replay=str(folder), run_dir=f"{folder}-again", quiet=True
        )
    return bool(again["replay_identical"])


def _quiet() -> None:
    torch.set_num_threads(1)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)


def _alone(run: Run, folders: Folders) -> Parts | str:
    """One run in this process: its parts, or why it has failed."""
    folder, source = folders.of(run.key), ""
    try:
        if is_replay(run):
            source = str(folders.source(run))
        elif run.of:
            if not lay_checkpoint(folders.source(run), folder):
                return {"nothing to go on from": ""}
            source = run.of
        train(run, source, str(folder))
        return outcome(run, folder)
    except Exception as error:
        return _failure(error)


def _chain(runs: Sequence[Run], folders: Folders) -> list[Parts | str]:
    """A run and those that go on from it."""
    return [_alone(run, folders) for run in runs]


def in_processes(
    runs: Iterable[Run], folders: Folders, num_processes: int
) -> Iterator[tuple[Run, Parts | str]]:
    """Runs in virtual time and in threads, several at once."""
    chains: dict[str, list[Run]] = {}
    heads: dict[str, str] = {}
    for run in runs:
        head = heads[run.key] = run.key if is_replay(run) else heads.get(run.of, run.of or run.key)
        chains.setdefault(head, []).append(run)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, context, _quiet) as pool:
        told = [(chain, pool.submit(_chain, chain, folders)) for chain in chains.values()]
        for chain, future in told:
            yield from zip(chain, future.result(), strict=True)


def over_mpi(runs: Iterable[Run], folders: Folders) -> Iterator[tuple[Run, Parts | str]]:
    """Runs over MPI, the largest launches first: what goes on with fewer ranks finds its checkpoint."""
    by_ranks: dict[int, list[Run]] = {}
    for run in runs:
        by_ranks.setdefault(run.ranks, []).append(run)
    for num_ranks in sorted(by_ranks, reverse=True):
        left = by_ranks[num_ranks]
        while left:
            result, num_ended = _launch(num_ranks, left, folders)
            for run in left[:num_ended]:
                yield run, _after_launch(run, folders.of(run.key))
            left = left[num_ended:]
            if left:
                lines = [line for line in result.stderr.splitlines() if "Error" in line]
                yield left[0], f"the launch ended with code {result.code}: {' '.join(lines[-2:])[:500]}"
                left = left[1:]


def _after_launch(run: Run, folder: Path) -> Parts | str:
    """What is recorded of a run of a launch, or why it cannot be."""
    if not any((folder / name).is_file() for name in (OUTCOME, "result.json")):
        return {"nothing to go on from": ""}
    try:
        return outcome(run, folder)
    except Exception as error:
        return _failure(error)


def _failure(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _launch(num_ranks: int, runs: Sequence[Run], folders: Folders) -> tuple[Result, int]:
    """How a launch ended, and how many of its runs had come to their end by then."""
    rows = [[vars(run), str(folders.source(run)) if run.of else "", str(folders.of(run.key))] for run in runs]
    listing = folders.runs / f"launch-{num_ranks}-{time.monotonic_ns()}.json"
    listing.write_text(json.dumps(rows))
    try:
        result = launch_program(num_ranks, "golden_runs", str(listing), timeout_s=1800)
    except RanksHung as hung:
        result = hung.result
    return result, result.ranks_out[0].count("golden run ended\n")


def run_all(runs: Sequence[Run], folders: Folders, num_processes: int) -> Iterator[tuple[Run, Parts | str]]:
    """Every run with what is recorded of it, or why it has failed; what repeats an order of arrival comes last."""
    replays = [run for run in runs if is_replay(run)]
    alone = [run for run in runs if run.world != MPI and not is_replay(run)]
    yield from in_processes(alone, folders, num_processes)
    yield from over_mpi((run for run in runs if run.world == MPI), folders)
    yield from in_processes(replays, folders, num_processes)


def keep(run: Run, folders: Folders) -> None:
    """Keep what runs of a comparison begin with: a checkpoint, or an order of arrival."""
    target = folders.kept_of(run.key)
    if run.course == FRESH:
        target.mkdir(parents=True, exist_ok=True)
        for pattern in REPLAYED_FILES:
            for path in folders.of(run.key).glob(pattern):
                shutil.copy(path, target / path.name)
    elif (folders.of(run.key) / FOLDER).is_dir():
        lay_checkpoint(folders.of(run.key), target)
