"""The digits job, cut down to what shows that it trains: two passes, and a target that they reach."""

import dataclasses
import runpy
from pathlib import Path

_digits = runpy.run_path(str(Path(__file__).parents[2] / "jobs" / "digits.py"))["job"]
job = dataclasses.replace(_digits, epochs=2, target={"accuracy": 0.9})
