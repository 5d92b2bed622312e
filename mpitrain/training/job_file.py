"""A job file: Python that ends in a `job`, or a module that holds one.

Invariants: a mistake in the file is reported with the file and the line, in one sentence and without a traceback of
this package.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Sequence

from mpitrain.errors import UsageError
from mpitrain.job import Job
from mpitrain.options import hand_on, reading, told_of_argparse
from mpitrain.system.files.job_source import JobSource, find_job
from mpitrain.system.files.user_module import import_anew, run_file
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
    """Run a job file, or import its module anew, and return its `job`.

    Args:
        path: see `system/files/job_source.py`.
        settings: values for what the file declares with `Options`, as texts such as "model.hidden=256".

    Raises:
        UsageError: no such file, it does not define `job = mpitrain.Job(...)`, or it declares no such parameter, or one
            of another type.
    """
    source = find_job(path)
    hand_on(str(source.file), settings)
    with reading(path, settings) as declared, told_of_argparse(source.file):
        job = _run(source)
    if job.options:
        raise UsageError(
            f"{path}: Job: options is entered from what the file declares with mpitrain.Options(...)"
        )
    return dataclasses.replace(job, options=dict(declared))


def _run(source: JobSource) -> Job:
    file, name = source.file, source.name or "job"
    try:
        names = import_anew(source.module, source.root) if source.module else run_file(file)
        job = names.get(name)
        if source.name and callable(job) and not isinstance(job, Job):
            job = job()
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
        raise UsageError(
            f"{file} exits ({end.code!r}) before it has defined its `job`; a job file takes no words of the command "
            "line: mpitrain.Options declares its parameters, and --set gives them"
        ) from None
    if not isinstance(job, Job):
        found = f"no {name!r}" if job is None else f"{name!r} is {type(job).__name__}"
        is_script = job is None and not source.name and not source.module
        loop = f"; a script with a loop of its own is launched: mpitrain launch -n 4 {file}" * is_script
        raise UsageError(
            f"{file}: {found}; a job file ends in `{name} = mpitrain.Job(model=..., loss=..., optimizer=..., data=...)`"
            f"{loop}"
        )
    return job if job.name else dataclasses.replace(job, name=source.stem)
