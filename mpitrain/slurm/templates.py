"""All batch templates and the site file, by the names that they have in `slurm/` of the checkout: a pure function."""

from __future__ import annotations

import re

from mpitrain.errors import UsageError
from mpitrain.slurm.batch_systems import OTHER_KINDS, render
from mpitrain.slurm.script import KINDS, SYSTEMS, Script
from mpitrain.slurm.site import render_site

FOLDER = "slurm"
_OWN_PATH = re.compile(rf"(?<![\w./]){FOLDER}/(?=(?:other/)?[\w-]+\.(?:sh|sbatch|pbs|lsf|flux)\b)")


def templates(folder: str = FOLDER, launcher: str = "openmpi", image: str = "") -> dict[str, str]:
    """The texts of a folder of templates.

    Args:
        folder: where they will lie, as seen from where jobs are submitted; they name their site file by it.
        launcher, image: as for `render_site`.
    Raises:
        UsageError: a batch script could not name the folder without quotes; or as `render_site`.
    """
    folder = folder.rstrip("/") or folder
    if not re.fullmatch(r"[\w./+@-]+", folder, re.ASCII):
        raise UsageError(f"{folder!r}: batch scripts name their folder; take letters, digits and . / _ - + @")
    others = [(system, kind) for system in SYSTEMS if system != "slurm" for kind in OTHER_KINDS]
    texts = {f"{kind}.sbatch": render(Script(kind)) for kind in KINDS}
    texts |= {"site.sh": render_site(launcher, image)}
    texts |= {f"other/{kind}.{system}": render(Script(kind, system=system)) for system, kind in others}
    return {name: _OWN_PATH.sub(f"{folder}/", text) for name, text in texts.items()}
