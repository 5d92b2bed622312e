"""What a run has cost over all its starts: hours, nodes and energy, counted by RAPL or by Slurm, or by nobody."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from mpitrain.system import energy
from mpitrain.system.energy import EnergyMeter
from mpitrain.system.legs import begin_leg, end_leg, joules_by_slurm, read_legs, totals
from mpitrain.training import accounting


def powercap(folder: Path, **domains: int) -> Path:
    """A /sys/class/powercap with these counters in uJ, by number and name."""
    for key, value in domains.items():
        number, name = key.split("_", 1)
        here = folder / f"intel-rapl:{number.replace('x', ':')}"
        here.mkdir(parents=True, exist_ok=True)
        for file, text in (
            ("name", name.replace("_", "-")),
            ("energy_uj", value),
            ("max_energy_range_uj", 1000),
        ):
            (here / file).write_text(f"{text}\n")
    return folder


def test_a_meter_adds_packages_and_memory_and_sees_a_counter_wrap(tmp_path: Path) -> None:
    meter = EnergyMeter(
        powercap(tmp_path, **{"0_package_0": 900, "0x0_core": 5, "0x1_dram": 10, "1_psys": 7})
    )
    assert meter.joules() == 0
    powercap(tmp_path, **{"0_package_0": 950, "0x0_core": 500, "0x1_dram": 30, "1_psys": 900})
    assert meter.joules() == pytest.approx(70e-6)
    powercap(tmp_path, **{"0_package_0": 50})  # 100 more, of 1000
    assert meter.joules() == pytest.approx(170e-6)
    meter.stop()


def test_a_node_without_counters_has_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert EnergyMeter(tmp_path / "absent").joules() is None
    monkeypatch.setattr(
        energy, "_number", lambda path: None if path.name == "energy_uj" else 1000
    )  # for root alone
    assert EnergyMeter(powercap(tmp_path, **{"0_package_0": 900})).joules() is None


def test_starts_add_up_and_one_that_was_killed_counts_to_its_last_row(tmp_path: Path) -> None:
    rows = tmp_path / "metrics.jsonl"
    rows.touch()
    begin_leg(tmp_path, "a", ["n1", "n2"], rows)
    with (tmp_path / "legs.jsonl").open("a") as file:
        file.write(
            '[1]\n{"attempt": "a", "wall_s": -1}\n{"attempt": "z", "wall_s": 5}\n{"attempt": "a", "wall'
        )
        file.write(
            '\n{"attempt": "b", "hosts": 7, "began_s": 0}\n{"attempt": "b", "hosts": [], "began_s": 1e999}\n'
        )
    (killed,) = read_legs(tmp_path)
    assert not killed.closed and killed.hosts == ("n1", "n2")
    os.utime(rows, (killed.began_s + 7200, killed.began_s + 7200))
    begin_leg(tmp_path, "c", ["n3"], rows)
    end_leg(tmp_path, "c", 1800.0, 50.0)
    found = totals(read_legs(tmp_path), "rapl")
    assert found["num_starts"] == 2 and found["hosts"] == ["n3"]
    assert found["total_wall_s"] == pytest.approx(9000) and found["node_hours"] == pytest.approx(2 * 2 + 0.5)
    assert (
        found["energy_joules"] is None and found["energy_source"] is None
    )  # nobody has counted the killed one's


def test_a_run_that_goes_on_elsewhere_takes_its_starts_along(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        (folder / "metrics.jsonl").touch()
    begin_leg(first, "a", ["n1"], first / "metrics.jsonl")
    end_leg(first, "a", 10.0, 3.0)
    begin_leg(second, "b", ["n2"], second / "metrics.jsonl", first)
    end_leg(second, "b", 20.0, 4.0)
    found = totals(read_legs(second), "slurm")
    assert (found["num_starts"], found["total_wall_s"]) == (2, 30.0)
    assert (found["energy_joules"], found["energy_source"]) == (7.0, "slurm")
    assert len(read_legs(first)) == 1


@pytest.mark.parametrize(("answer", "joules"), [("5123", 5123.0), ("0", None), ("", None), ("5\n6", None)])
def test_slurm_is_asked_for_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, joules
) -> None:
    (tmp_path / "sstat").write_text(f"#!/bin/bash\n[[ $* == *--jobs=12.3* ]] && printf '{answer}'\n")
    (tmp_path / "sstat").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.delenv("FLUX_JOB_ID", raising=False)
    assert joules_by_slurm() is None  # no step
    monkeypatch.setenv("SLURM_STEP_ID", "3")
    assert joules_by_slurm() == joules


def test_the_account_names_nodes_once_and_adds_their_energy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three ranks on two nodes; with one node uncounted there is no figure."""
    monkeypatch.setattr(energy, "POWERCAP", powercap(tmp_path / "powercap", **{"0_package_0": 100}))
    monkeypatch.setattr(accounting, "joules_by_slurm", lambda: None)
    runtime = SimpleNamespace(rank=0, local_rank=0, nodes=(0, 0, 1), hosts=["n1", "n1", "n2"])
    account = accounting.Account(runtime, tmp_path, "a")
    account.begin(None)
    powercap(tmp_path / "powercap", **{"0_package_0": 600})
    own = account.counted()
    assert own == {"joules": pytest.approx(500e-6)}
    assert (
        accounting.Account(SimpleNamespace(**vars(runtime) | {"local_rank": 1}), tmp_path, "a").counted()
        == {}
    )
    result = account.end([own, {}, {"joules": 2.0}], 36.0)
    assert result["hosts"] == ["n1", "n2"] and result["node_hours"] == pytest.approx(0.02)
    assert (result["energy_joules"], result["energy_source"]) == (pytest.approx(2.0005), "rapl")
    assert account.end([own, {"joules": None}], 36.0)["energy_joules"] is None
    monkeypatch.setattr(accounting, "joules_by_slurm", lambda: 9.0)
    assert account.end([own, {"joules": None}], 36.0)["energy_source"] == "slurm"
