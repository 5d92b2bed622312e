"""What ranks tell each other to find out whether they agree, and what users are told where they do not: no messages.

Invariants: as long as ranks agree, what one rank sends is as long among ten thousand ranks as among two: a flag, or a
digest. Texts travel to rank 0 alone, and only where something is wrong.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from mpitrain.errors import EXIT_ERROR, MpitrainError
from mpitrain.system.launched.node_map import name_ranks
from mpitrain.system.tracebacks import frames

STARTED_DIFFERENTLY = (
    "mpitrain: UsageError: the ranks were started differently; give all of them the same options"
)
ABSENT = "absent"


def describe_error(error: Exception) -> dict[str, Any]:
    """An error as JSON values. Errors that are not ours keep their traceback; ours say what is wrong by themselves."""
    ours = isinstance(error, MpitrainError)
    return {
        "text": f"{type(error).__name__}: {error}",
        "trace": "" if ours else frames(error),
        "exit_code": error.exit_code if isinstance(error, MpitrainError) else EXIT_ERROR,
    }


def error_text(brought: Sequence[dict[str, Any] | None]) -> tuple[str, int]:
    """What is printed of the errors of all ranks, each once, and the exit code of the lowest rank that has one."""
    failed = {rank: failure for rank, failure in enumerate(brought) if failure is not None}
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, failure in failed.items():
        groups.setdefault((failure["text"], failure["trace"]), []).append(rank)
    lines = [
        f"{trace}mpitrain: {name_ranks(ranks, len(brought))}: {text}"
        for (text, trace), ranks in groups.items()
    ]
    return "\n".join(lines), next(iter(failed.values()))["exit_code"]


def digest_words(values: Mapping[str, object]) -> list[int]:
    """Eight numbers below 2**64: those of a digest of JSON values by name, and their complements. Where the largest of
    each over all ranks are a rank's own, no rank has another digest; otherwise no rank finds its own."""
    digest = hashlib.sha256(json.dumps(sorted(values.items())).encode()).digest()
    words = struct.unpack("<4Q", digest)
    return [*words, *(2**64 - 1 - word for word in words)]


def texts_of(values: Mapping[str, object]) -> dict[str, str]:
    """JSON values by name, as they are shown; equal texts are equal values."""
    return {name: repr(value) for name, value in json.loads(json.dumps(dict(values))).items()}


def differences(first: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """Where a rank's texts differ from those of rank 0."""
    names = dict.fromkeys([*first, *own])
    return {name: own.get(name, ABSENT) for name in names if own.get(name, ABSENT) != first.get(name, ABSENT)}


def difference_text(first: Mapping[str, str], differing: Sequence[Mapping[str, str]]) -> str:
    """What is printed where ranks were started differently: each field that differs, and which ranks hold which value.
    `differing`: of every rank, `differences` from the first."""
    lines = [STARTED_DIFFERENTLY]
    odd = {name for each in differing for name in each}
    for name in dict.fromkeys([*first, *(name for each in differing for name in each)]):
        if name not in odd:
            continue
        groups: dict[str, list[int]] = {}
        for rank, each in enumerate(differing):
            groups.setdefault(each.get(name, first.get(name, ABSENT)), []).append(rank)
        held = zip(_excerpts(list(groups)), groups.values())
        lines.append(
            f"  {name}: " + "; ".join(f"{text} on {name_ranks(r, len(differing))}" for text, r in held)
        )
    return "\n".join(lines)


def _excerpts(texts: list[str], width: int = 100) -> list[str]:
    """Different texts, cut to `width` characters around the first place where they differ."""
    shared = len(os.path.commonprefix(texts))
    start = max(0, shared - width // 2) if max(map(len, texts)) > width else 0
    cut = [text[start : start + width] for text in texts]
    return [
        "..." * (start > 0) + piece + "..." * (start + width < len(text)) for piece, text in zip(cut, texts)
    ]
