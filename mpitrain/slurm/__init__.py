"""Slurm: batch scripts as text, submitting them, whether a job may run again, and what became of it.

Invariants: the standard library only, no MPI, no torch. A script is a pure function of a `Script`
(`script.py`); the files in `slurm/` of the checkout are what `render` gives for its defaults, and a test compares
them whole. Decisions that a batch script takes are functions here (`requeue.py`), so that they have tests.
"""

from mpitrain.slurm.batch_systems import render
from mpitrain.slurm.requeue import may_requeue
from mpitrain.slurm.script import KINDS, SYSTEMS, Script
from mpitrain.slurm.site import LAUNCHERS, render_site
from mpitrain.slurm.status import describe
from mpitrain.slurm.submit import submit
from mpitrain.slurm.templates import templates

__all__ = [
    "KINDS",
    "LAUNCHERS",
    "SYSTEMS",
    "Script",
    "describe",
    "may_requeue",
    "render",
    "render_site",
    "submit",
    "templates",
]
