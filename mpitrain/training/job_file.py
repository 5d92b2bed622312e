"""A job file: Python that ends in a `job`.

Invariants: a mistake in the file is reported with the file and the line, in one sentence and without a traceback of
this package.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Sequence
from pathlib import Path

from mpitrain.errors import UsageError
from mpitrain.job import Job
from mpitrain.options import hand_on, reading
from mpitrain.system.files.user_module import run_file
from mpitrain.values import nearest


def _explain_fields(path: str, error: TypeError) -> str:
    """What is wrong with the arguments of a `Job(...)` in the job file at `path`."""
    known = [field.name for field in dataclasses.fields(Job)]
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    text = str(error).removeprefix("Job.__init__() ")
    unknown = text.split("'")[1] if text.startswith("got an unexpected keyword argument") else ""
    reason = f"Job has no field {unknown!r}{nearest(unknown, known)}" if unknown else f"Job(...) {text}"
    return f"{path}, line {lines[-1] if lines else '?'}: {reason}"


def load_job(path: str, settings: Sequence[str] = ()) -> Job:
    """Run a job file and return its `job`.

    Args:
        settings: values for what the file declares with `Options`, as texts such as "model.hidden=256".

    Raises:
        UsageError: no such file, it does not define `job = mpitrain.Job(...)`, or it declares no such parameter, or one
            of another type.
    """
    hand_on(path, settings)
    with reading(path, settings) as declared:
        job = _run_file(path)
    if job.options:
        raise UsageError(
            f"{path}: Job: options is entered from what the file declares with mpitrain.Options(...)"
        )
    return dataclasses.replace(job, options=dict(declared))


def _run_file(path: str) -> Job:
    file = Path(path)
    if not file.is_file():
        raise UsageError(f"no job file {path!r} (looked in {Path.cwd()})")
    try:
        names = run_file(file)
    except SyntaxError as error:
        where = f"{error.filename}, line {error.lineno}"
        raise UsageError(f"{where}: {error.msg}: {(error.text or '').strip()}") from None
    except TypeError as error:
        if "Job.__init__() " not in str(error):
            raise
        raise UsageError(_explain_fields(str(file), error)) from None
    except ModuleNotFoundError as error:
        frames = [
            one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith("<frozen")
        ]
        if frames[-1].filename != str(file):
            raise
        raise UsageError(
            f"{file}, line {frames[-1].lineno}: {error.msg}; install it beside mpitrain, or correct the name"
        ) from None
    except SystemExit as end:
        raise UsageError(f"{file} exits ({end.code!r}) before it has defined its `job`") from None
    job = names.get("job")
    if not isinstance(job, Job):
        found = "no 'job'" if job is None else f"'job' is {type(job).__name__}"
        raise UsageError(
            f"{path}: {found}; a job file ends in `job = mpitrain.Job(model=..., loss=..., "
            "optimizer=..., data=...)`"
        )
    return job if job.name else dataclasses.replace(job, name=file.stem)
