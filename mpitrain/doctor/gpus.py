"""The GPUs of this node: are they there, do they compute, how fast, and what does the driver say of them?

Invariants: parsing what `nvidia-smi -q -x` prints is a pure function. It has been tested on texts only, and nothing
here has run on a GPU so far. Devices of other makers are counted and compute, and their drivers are not asked.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any, NamedTuple
from xml.etree import ElementTree

from mpitrain.doctor.checks import Seen, Unfit, Wanted
from mpitrain.doctor.judge import FIGURES, told
from mpitrain.doctor.speed import best_s

_SLOWED = {
    "hw_slowdown": "slowed down by the hardware",
    "hw_thermal_slowdown": "slowed down by the hardware: too hot",
    "hw_power_brake_slowdown": "slowed down by the power supply's brake",
}
_SIDE = 4096


class Gpu(NamedTuple):
    """What the driver says of one GPU. `faults`: what makes it unfit; clocks in MHz, power in W, `None`: not told."""

    name: str
    faults: tuple[str, ...]
    max_clock_mhz: float | None
    power_limit_w: float | None


def check_devices(wanted: Wanted) -> str | Seen:
    """As many devices as there should be, each of which computes."""
    expected = wanted.num_gpus
    if wanted.devices:
        pattern = os.path.expandvars(wanted.devices)
        found = len(glob.glob(pattern))
        if found < expected:
            raise Unfit(f"{found} of {expected} device(s) match {pattern}")
        return f"{found} device(s)"
    if not expected:
        return "no devices asked for"
    import torch

    from mpitrain.devices import accelerator

    there = accelerator.all_devices()
    if len(there) < expected:
        raise Unfit(f"torch sees {len(there)} of {expected} device(s)")
    speeds = []
    for device in there:
        ones = torch.ones(1 << 20, device=device)
        if float(ones.sum()) != 1 << 20:
            raise Unfit(f"device {device.index} cannot add ones")
        if wanted.speed_s:
            speeds.append(_matmul_rate(device, wanted.speed_s / len(there)))
    return Seen(
        f"{len(there)} {there[0].type} device(s) compute",
        {"gpu_matmul_gflop_per_s": min(speeds)} if speeds else {},
    )


def _matmul_rate(device: Any, seconds: float) -> float:
    import torch

    from mpitrain.devices import accelerator

    left = torch.ones(_SIDE, _SIDE, device=device)
    out = torch.empty_like(left)

    def multiply() -> None:
        torch.mm(left, left, out=out)
        accelerator.wait_for_all(device)

    return 2 * _SIDE**3 / best_s(multiply, seconds) / 1e9


def check_gpu_health(wanted: Wanted) -> str | Seen:
    """What the NVIDIA driver has counted and is holding back: memory errors, clocks, power."""
    if wanted.devices or not wanted.num_gpus:
        return "no GPUs asked for"
    if shutil.which("nvidia-smi") is None:
        return "there is no nvidia-smi to ask, and no other maker's driver is asked"
    run = subprocess.run(["nvidia-smi", "-q", "-x"], capture_output=True, text=True, timeout=25)
    if run.returncode:  # a GPU that has fallen off the bus is told so, on either stream
        raise Unfit(f"nvidia-smi: {' '.join((run.stdout + run.stderr).split())[:200]}")
    return judge_gpus(list(parse_nvidia_smi(run.stdout)))


def judge_gpus(gpus: list[Gpu]) -> Seen:
    """The figures of the slowest one.

    Raises:
        Unfit: one of them has a fault.
    """
    faults = [
        f"GPU {number} ({gpu.name}): {fault}" for number, gpu in enumerate(gpus) for fault in gpu.faults
    ]
    if faults:
        raise Unfit("; ".join(faults))
    limits = {
        "gpu_max_clock_mhz": [gpu.max_clock_mhz for gpu in gpus if gpu.max_clock_mhz is not None],
        "gpu_power_limit_w": [gpu.power_limit_w for gpu in gpus if gpu.power_limit_w is not None],
    }
    figures = {name: min(values) for name, values in limits.items() if values}
    words = [f"{FIGURES[name].label} {told(name, value)}" for name, value in figures.items()]
    return Seen(", ".join([f"{len(gpus)} GPU(s) without errors", *words]), figures)


def parse_nvidia_smi(text: str) -> Iterator[Gpu]:
    """The GPUs of `nvidia-smi -q -x`, from drivers before and after 535, which renamed throttle reasons and power.

    Raises:
        Unfit: it is not such a text.
    """
    try:
        found = ElementTree.fromstring(text).findall("gpu")
    except ElementTree.ParseError as error:
        raise Unfit(f"nvidia-smi printed something that cannot be read ({error})") from None
    for gpu in found:
        yield Gpu(
            gpu.findtext("product_name", "unknown"),
            tuple(_faults(gpu)),
            _number(gpu, "max_clocks/sm_clock"),
            next(
                (
                    value
                    for path in ("gpu_power_readings/current_power_limit", "power_readings/power_limit")
                    if (value := _number(gpu, path)) is not None
                ),
                None,
            ),
        )


def _faults(gpu: ElementTree.Element) -> Iterator[str]:
    counts = [
        _number(element, ".")
        for element in gpu.iterfind("ecc_errors/volatile//*")
        if "uncorrectable" in element.tag
    ]
    counts += [_number(gpu, "ecc_errors/volatile/double_bit/total")]
    if uncorrected := sum(count for count in counts if count):
        yield f"{uncorrected:.0f} uncorrected memory error(s) since the driver was loaded"
    pending = ("remapped_rows/remapped_row_pending", "retired_pages/pending_retirement")
    if any(gpu.findtext(path) == "Yes" for path in pending):
        yield "bad memory that is to be mapped out at the next reset of the GPU"
    if gpu.findtext("remapped_rows/remapped_row_failure") == "Yes":
        yield "bad memory that cannot be mapped out"
    for name, words in _SLOWED.items():
        paths = (
            f"clocks_event_reasons/clocks_event_reason_{name}",
            f"clocks_throttle_reasons/clocks_throttle_reason_{name}",
        )
        if any(gpu.findtext(path) == "Active" for path in paths):
            yield words


def _number(gpu: ElementTree.Element, path: str) -> float | None:
    """The number that a text like "1980 MHz" begins with; `None` for "N/A" and where there is none."""
    text = gpu.text if path == "." else gpu.findtext(path)
    found = re.match(r"\s*(\d+(?:\.\d+)?)", text or "")
    return float(found[1]) if found else None
