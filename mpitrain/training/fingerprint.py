"""The options that must be equal on all ranks, as JSON values that can be compared.

Invariants: values are given in full, functions by their name and a digest of their code, so two versions of a job file
differ, and the same file is equal on all ranks.
"""

from __future__ import annotations

import dataclasses
import hashlib
from types import CodeType
from typing import Any

from mpitrain.job import Job
from mpitrain.model.user_code import unwrapped


def options(job: Job) -> dict[str, Any]:
    """What must be equal on all ranks, as JSON: values in full, functions by name and code."""
    return {
        field.name: fingerprint(getattr(job, field.name))
        for field in dataclasses.fields(job)
        if field.name not in ("name",)
    }


def fingerprint(value: Any) -> Any:
    value = unwrapped(value)
    code = getattr(value, "__code__", None)
    if code is not None:
        return f"{value.__qualname__}@{hashlib.sha256(_code_text(code).encode()).hexdigest()[:12]}"
    if isinstance(value, int | float | str | bool | type(None)):
        return value
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    text = repr(value)
    return type(value).__qualname__ if " at 0x" in text else text


def _code_text(code: CodeType) -> str:
    constants = [_code_text(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {constants}"
