"""The options that must be equal on all ranks, and the contents of the data, as JSON values that can be compared.

Invariants: values are given in full, functions by their name and a digest of their code, so two versions of a job file
differ, and the same file is equal on all ranks.
"""

from __future__ import annotations

import dataclasses
import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from types import CodeType
from typing import Any

from mpitrain.data import Catalogue
from mpitrain.data.format.manifest import Manifest
from mpitrain.errors import DataError
from mpitrain.job import Job
from mpitrain.model.gradient.user_code import unwrapped
from mpitrain.strategies.schedules import ByFunction
from mpitrain.system.files.job_source import JobSource, find_job


def options(job: Job) -> dict[str, Any]:
    """What must be equal on all ranks, as JSON: values in full, functions by name and code."""
    return {
        field.name: fingerprint(getattr(job, field.name))
        for field in dataclasses.fields(job)
        if field.name not in ("name",)
    }


def fingerprint(value: Any) -> Any:
    value = unwrapped(value)
    value = value.function if isinstance(value, ByFunction) else value
    code = getattr(value, "__code__", None)
    if code is not None:
        return f"{value.__qualname__}@{hashlib.sha256(_code_text(code).encode()).hexdigest()[:12]}"
    if isinstance(value, Mapping) and any(map(callable, value.values())):
        return {str(name): fingerprint(one) for name, one in value.items()}
    if isinstance(value, int | float | str | bool | type(None)):
        return value
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    text = repr(value)
    return type(value).__qualname__ if " at 0x" in text else text


def _code_text(code: CodeType) -> str:
    constants = [_code_text(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {constants}"


def file_digest(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def of_job_file(text: str | None) -> dict[str, str | None]:
    """What `run.json` says of where the job stands, by which another process finds it, and of what stood there."""
    if text is None:
        return {"job_file": None, "job_sha256": None}
    source = find_job(text)
    return {"job_file": str(source), "job_sha256": file_digest(source.file)}


def of_program(job: Job) -> dict[str, str]:
    """The same of a job that a program has brought, where it is a variable of the script; nothing where it is none."""
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    if main is None or file is None or not Path(file).is_file():
        return {}
    for name, value in list(vars(main).items()):  # the program's threads may add some
        if (
            isinstance(value, Job) and value.optimizer is job.optimizer
        ):  # options of the run make another job of it
            source = JobSource(Path(file), name)
            return {"made_in": str(source), "made_in_sha256": file_digest(source.file)}
    return {}


def contents_of(catalogue: Catalogue) -> dict[str, str]:
    """SHA-256 of the shards by name, of those that `mpitrain data pack` has written."""
    found: dict[str, str] = {}
    for folder in {Path(file.path).parent for file in catalogue.files}:
        try:
            manifest = Manifest.read(folder)
        except DataError:
            continue
        names = {Path(file.path).name for file in catalogue.files}
        if manifest is not None and manifest.complete:
            found |= {name: sha for name, sha in manifest.sha256.items() if name in names}
    return found
