"""An ensemble or a soup as a directory: weights as safetensors, all else as JSON.

    DIR/ensemble.json  member-0/run.json result.json model.safetensors  member-1/...      an ensemble
    DIR/soup.json  run.json result.json model.safetensors                                 a soup: one model

Invariants: each folder with weights looks like a finished run, so whatever loads a run loads it, and the directory
stands without the runs that it was made of. It has its name only when it is whole.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from mpitrain.errors import EXIT_OK, UsageError
from mpitrain.job import Job
from mpitrain.reporting.report import RESULT_SCHEMA, write_json, writing
from mpitrain.system.files.atomic import check_output
from mpitrain.system.files.folders import make_private
from mpitrain.system.files.run_directory import RUN_FILE, read_json
from mpitrain.training.ensembles.combine import HOWS, Ensemble
from mpitrain.training.measure import MODEL_FILE

ENSEMBLE_FILE, SOUP_FILE = "ensemble.json", "soup.json"
SCHEMA = 1
_KEPT = ("schema", "run", "options", "job_file", "job_sha256")

LoadMember = Callable[[Path, Job | str | Path | None], tuple[Job, nn.Module]]


def check_new_directory(path: Path, overwrite: bool) -> None:
    """Refuse a directory that exists, unless it holds an ensemble or a soup that may be replaced, and one that cannot
    be made. Those above it are made with it, as those of a run are.

    Raises:
        UsageError: says why.
    """
    if not path.exists():
        above = next(folder for folder in path.absolute().parents if folder.exists())
        check_output(above / path.name, "-o")
        return
    ours = any((path / name).is_file() for name in (ENSEMBLE_FILE, SOUP_FILE))
    if not ours:
        raise UsageError(f"-o {path} exists and holds no ensemble; give another name")
    if not overwrite:
        raise UsageError(f"{path} exists; give another name, or --overwrite to replace it")


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A directory to fill; it takes the name `path` when the block ends well, in place of what was there."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    old = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            make_private(temporary)
            yield temporary
            if path.exists():
                os.rename(path, old)
            os.rename(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def write_as_run(
    folder: Path,
    source: Path,
    job_file: Mapping[str, object],
    weights: Path | None,
    result: Mapping[str, Any],
) -> None:
    """Make `folder` look like the finished run in `source`.

    Args:
        job_file: its `job_file` and `job_sha256` where they are not those of the run.
        weights: the file that is copied to be the model; None where the model is there already.
        result: what `result.json` says besides.
    """
    make_private(folder)
    if weights is not None:
        shutil.copyfile(weights, folder / MODEL_FILE)
    run = read_json(source / RUN_FILE) or {}
    write_json(folder / RUN_FILE, {name: run[name] for name in _KEPT if name in run} | dict(job_file))
    source_result = read_json(source / "result.json") or {}
    job = source_result.get("job")
    write_json(
        folder / "result.json",
        {
            "schema": RESULT_SCHEMA,
            "status": "ok",
            "exit_code": EXIT_OK,
            "failure": None,
            "job": job,
            **result,
        },
    )


def member_folder(path: Path, number: int) -> Path:
    """Where an ensemble keeps one of its members."""
    return path / f"member-{number}"


def holds_ensemble(folder: Path) -> bool:
    """Whether it is the directory of an ensemble (a soup is one model, like a run)."""
    return (folder / ENSEMBLE_FILE).is_file()


def load_ensemble(
    folder: Path, job: Job | str | Path | None, load_member: LoadMember
) -> tuple[Job, Ensemble]:
    """The job of the first member, and the ensemble on the host in evaluation mode.

    Raises:
        UsageError: `ensemble.json` is damaged or of a later version; as `load_member`, of a member.
    """
    record = read_json(folder / ENSEMBLE_FILE) or {}
    if record.get("schema") not in (None, SCHEMA):
        raise UsageError(
            f"{folder / ENSEMBLE_FILE} has schema {record['schema']}, and this version of mpitrain reads {SCHEMA}; use "
            "the version that wrote it"
        )
    try:
        weights = [float(one["weight"]) for one in record["members"]]
        how, class_dim = str(record["combine"]), record["class_dim"]
        is_whole = bool(weights) and how in HOWS and (how == "outputs" or isinstance(class_dim, int))
    except (KeyError, TypeError, ValueError):
        is_whole = False
    if not is_whole:
        raise UsageError(
            f"{folder / ENSEMBLE_FILE} is damaged; make the ensemble anew with `mpitrain ensemble`"
        )
    loaded = [load_member(member_folder(folder, number), job) for number in range(len(weights))]
    ensemble = Ensemble([module for _, module in loaded], weights, how, class_dim)
    return loaded[0][0], ensemble.eval()


def model_bytes(folder: Path, file: str) -> int:
    """Of the weights of a run, or of all members of an ensemble."""
    if not holds_ensemble(folder):
        return (folder / file).stat().st_size
    return sum(one.stat().st_size for one in folder.glob(f"member-*/{MODEL_FILE}"))
