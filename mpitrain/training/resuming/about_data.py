"""What a result says of the data that a run is judged by, so that runs that were measured on other data are told apart.

Invariants: a held-out part is looked through for files that the run knows, and never read.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any

from mpitrain.data import Catalogue
from mpitrain.errors import UsageError
from mpitrain.job import Job, Overrides
from mpitrain.training.resuming.fingerprint import contents_of


def about_data(
    job: Job, overrides: Overrides, training: Catalogue | None, validation: Catalogue | None
) -> dict[str, Any]:
    """What the result says of the data that a run is judged by, so that runs measured on other data are told apart.

    Raises:
        UsageError: the held-out part cannot be read, or is trained on or chosen by.
    """
    found: dict[str, Any] = {"measured_on": digest_of(validation) if validation else None, "held_out": None}
    if job.test is not None:
        test = job.test.scan()
        check_apart(test, {"data": training, "validate": validation})
        pattern = overrides.test and os.path.abspath(overrides.test)
        found["held_out"] = {"data": digest_of(test), "pattern": pattern}
    return found


def digest_of(catalogue: Catalogue) -> str:
    """What tells the samples of a source from those of another one."""
    text = f"{catalogue.digest()} {sorted(contents_of(catalogue).items())}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_apart(test: Catalogue, others: dict[str, Catalogue | None]) -> None:
    """Refuse a held-out part that is trained on or chosen by.

    Args:
        others: by the name of the job's field.

    Raises:
        UsageError: names a file that is in both.
    """
    held = {_place(file.path) for file in test.files if os.path.exists(file.path)}
    for name, catalogue in others.items():
        for file in catalogue.files if catalogue else ():
            if _place(file.path) in held:
                raise UsageError(
                    f"test= (--test) is for samples that nothing is chosen by, and {file.path} is in {name}=, too: "
                    "give other shards (`mpitrain data pack --validate 0.2` sets a part aside)"
                )


def _place(path: str) -> str:
    return os.path.realpath(path)
