"""What is read from `nvidia-smi -q -x`. The texts have the elements that drivers of two generations print, with the
faults planted; nothing of this has been seen on a GPU here."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from mpitrain.doctor.checks import Unfit, Wanted
from mpitrain.doctor.gpus import check_gpu_health, judge_gpus, parse_nvidia_smi

TEXTS = Path(__file__).parent / "nvidia_smi"
NEW, OLD = (TEXTS / "driver_550.xml").read_text(), (TEXTS / "driver_470.xml").read_text()


def faults(text: str) -> list[tuple[str, ...]]:
    return [gpu.faults for gpu in parse_nvidia_smi(text)]


def test_healthy_gpus_of_two_generations_of_drivers() -> None:
    new, old = list(parse_nvidia_smi(NEW)), list(parse_nvidia_smi(OLD))
    assert [gpu[:] for gpu in new] == [("NVIDIA H100 80GB HBM3", (), 1980.0, 700.0)] * 2
    assert [gpu[:] for gpu in old] == [("Tesla V100-SXM2-16GB", (), 1530.0, 300.0)]
    seen = judge_gpus(new)
    assert seen.figures == {"gpu_max_clock_mhz": 1980.0, "gpu_power_limit_w": 700.0}
    assert seen.detail == "2 GPU(s) without errors, highest GPU clock 1980 MHz, GPU power limit 700 W"


@pytest.mark.parametrize(
    ("text", "before", "after", "said"),
    [
        (NEW, "<dram_uncorrectable>0<", "<dram_uncorrectable>3<", "3 uncorrected memory error(s)"),
        (NEW, "<sram_uncorrectable_parity>0<", "<sram_uncorrectable_parity>1<", "1 uncorrected memory"),
        (NEW, "row_pending>No", "row_pending>Yes", "mapped out at the next reset"),
        (NEW, "row_failure>No", "row_failure>Yes", "cannot be mapped out"),
        (NEW, "hw_thermal_slowdown>Not Active", "hw_thermal_slowdown>Active", "too hot"),
        (NEW, "power_brake_slowdown>Not Active", "power_brake_slowdown>Active", "power supply's brake"),
        (OLD, "hw_slowdown>Not Active", "hw_slowdown>Active", "slowed down by the hardware"),
        (OLD, "<pending_retirement>No", "<pending_retirement>Yes", "mapped out at the next reset"),
        (OLD, "<total>0<", "<total>2<", "2 uncorrected memory error(s)"),
    ],
)
def test_a_fault_is_found_on_the_gpu_that_has_it(text: str, before: str, after: str, said: str) -> None:
    bad = text.replace(before, after, 1)
    assert bad != text
    first, *others = faults(bad)
    assert len(first) == 1 and said in first[0] and not any(others)
    with pytest.raises(Unfit, match=r"^GPU 0 \("):
        judge_gpus(list(parse_nvidia_smi(bad)))


def test_errors_of_earlier_lives_and_what_the_user_set_are_no_faults() -> None:
    """Counts since the GPU was made, an idle clock, and a power cap of the software's."""
    aggregate = NEW.replace("<aggregate>\n", "<aggregate>\n<dram_uncorrectable>9</dram_uncorrectable>\n")
    capped = NEW.replace("sw_power_cap>Not Active", "sw_power_cap>Active")
    assert aggregate != NEW and capped != NEW
    assert faults(aggregate) == faults(capped) == [(), ()]


def test_the_command_is_asked_and_a_lost_gpu_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    script = tmp_path / "nvidia-smi"
    script.write_text(f"#!/bin/sh\nexec cat '{TEXTS / 'driver_550.xml'}'\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    assert "2 GPU(s) without errors" in check_gpu_health(Wanted(gpus=2))[0]
    assert check_gpu_health(Wanted(gpus=0)) == "no GPUs asked for"
    lost = "Unable to determine the device handle for GPU 0000:65:00.0: GPU is lost."
    script.write_text(f"#!/bin/sh\necho '{lost}'\nexit 15\n")
    with pytest.raises(Unfit, match="GPU is lost"):
        check_gpu_health(Wanted(gpus=2))
    script.write_text("#!/bin/sh\necho Failed to initialize NVML\n")
    with pytest.raises(Unfit, match="cannot be read"):
        check_gpu_health(Wanted(gpus=2))
