"""What is recorded of a run: a digest of each of its parts.

Left out of every part are dates, durations, rates, ids, paths, versions of programs, and digests of the text of a job's
functions.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from mpitrain.checkpoint.parts import FOLDER

MODELS = {"model": "model", "model-ema": "ema", "model-best": "best"}
CHANCE = {  # besides what ends in `_s` or `_ms`
    "attempt", "energy_joules", "energy_source", "goodput", "hosts", "idle_share", "library", "measured", "node_hours",
    "num_threads", "replay", "resumed_run", "run", "run_dir", "self", "sha256", "spread", "t", "time", "transport",
    "warmup_steps", "written_by",
}  # fmt: skip
RATES = ("samples_per_second", "samples_per_second_per_worker")
# How many pushes waited for a server, in how many buffers, and how far ahead a neighbour was: virtual time determines
# them.
REAL_CHANCE = ("max_pending", "peak_waiting_buffers", "max_steps_ahead", "max_unanswered")
_SOURCE = re.compile(r"@[0-9a-f]{12}\b")  # of a function, in what a checkpoint says of its job


def parts_of(run_dir: Path, is_virtual: bool) -> dict[str, str]:
    """Part -> digest. In virtual time the clock is a part of its own."""
    found = {}
    for path in sorted(run_dir.glob("*.safetensors")):
        found[MODELS.get(path.stem, path.stem)] = tensors_digest([path])
    if (run_dir / "best.json").is_file():
        found["best's record"] = text_digest(_read(run_dir / "best.json"), run_dir)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    validations = [row for row in rows if row.get("event") == "validation"]
    found["validations"] = text_digest(without_chance(validations), run_dir)
    result = _read(run_dir / "result.json")
    found["counts"] = text_digest(without_chance(result, () if is_virtual else REAL_CHANCE), run_dir)
    if is_virtual:
        found["clock"] = text_digest(only_times(result), run_dir)
        found["clock of validations"] = text_digest(only_times(validations), run_dir)
    if (run_dir / FOLDER).is_dir():
        found |= checkpoint_parts(run_dir)
    return found


def checkpoint_parts(run_dir: Path) -> dict[str, str]:
    """Tensors of all checkpoints, and what stands beside them. Tensors have numbers in the order in which a state names
    them, and what a server keeps of each worker it names in the order of first arrival: here in the order of keys."""
    tensors, records = [], []
    for path in sorted((run_dir / FOLDER).rglob("*.json")):
        numbers: dict[str, str] = {}
        place = str(path.relative_to(run_dir))
        records.append([place, without_chance(_in_order(_read(path), numbers))])
        if path.with_suffix(".safetensors").is_file():
            tensors.append((place, load_file(path.with_suffix(".safetensors")), numbers))
    return {
        "checkpoints' tensors": numbered_digest(tensors),
        "checkpoints' records": text_digest(records, run_dir),
    }


def _read(path: Path) -> Any:
    return json.loads(path.read_text())


def _in_order(value: Any, numbers: dict[str, str]) -> Any:
    """A record with its keys in order, and its tensors numbered in that order; `numbers`: theirs, by those they had."""
    if isinstance(value, dict):
        for kind in ("__tensor__", "__array__"):
            if kind in value:
                return {kind: numbers.setdefault(value[kind], str(len(numbers)))}
        if "__pairs__" in value:
            pairs = sorted(value["__pairs__"], key=lambda pair: json.dumps(pair[0]))
            return {"__pairs__": _in_order(pairs, numbers)}
        return {key: _in_order(one, numbers) for key, one in sorted(value.items())}
    if isinstance(value, list):
        return [_in_order(one, numbers) for one in value]
    return value


def tensors_digest(paths: Iterable[Path]) -> str:
    """Of names, types, shapes and numbers."""
    return numbered_digest(("", load_file(path), {}) for path in paths)


def numbered_digest(files: Iterable[tuple[str, dict[str, torch.Tensor], dict[str, str]]]) -> str:
    """The same, of (place, tensors, other names of some of them)."""
    digest = hashlib.sha256()
    for place, tensors, names in files:
        digest.update(place.encode())
        for name, tensor in sorted((names.get(name, name), tensor) for name, tensor in tensors.items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def text_digest(value: Any, run_dir: Path | None = None) -> str:
    """Of what JSON can hold; the run directory counts as one and the same everywhere."""
    text = json.dumps(value, sort_keys=True)
    if run_dir is not None:
        text = text.replace(str(run_dir), "RUN")
    return hashlib.sha256(_SOURCE.sub("", text).encode()).hexdigest()


def without_chance(value: Any, besides: Collection[str] = ()) -> Any:
    """Without what differs between two runs of the same bits."""
    left_out = {*CHANCE, *RATES, *besides}
    return _chosen(value, lambda key: not (key.endswith(("_s", "_ms")) or key in left_out))


def only_times(value: Any) -> Any:
    """Times and rates of a virtual clock, with the places where they stand."""
    if isinstance(value, dict):
        found = {
            key: one if key.endswith("_s") or key in RATES else only_times(one)
            for key, one in value.items()
            if key != "wall_s"
        }
        return {key: one for key, one in found.items() if one not in (None, {}, [])}
    if isinstance(value, list):
        return [only_times(one) for one in value if isinstance(one, dict | list)]
    return None


def _chosen(value: Any, keeps: Callable[[str], bool]) -> Any:
    if isinstance(value, dict):
        return {key: _chosen(one, keeps) for key, one in value.items() if keeps(key)}
    if isinstance(value, list):
        return [_chosen(one, keeps) for one in value]
    return value
