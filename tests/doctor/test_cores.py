"""How much of its cores a node's processes may have: quotas of control groups, of both versions, and affinity."""

from pathlib import Path

import pytest

from mpitrain.doctor.checks import Unfit, Wanted
from mpitrain.doctor.cores import Periods, check_cores, quota_cores, share_throttled, throttled_periods
from mpitrain.system import control_groups


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Makes control groups of this process: the outer and the inner."""

    def make(own, **files):
        (tmp_path / "own").write_text(own)
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/").replace("_dot_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    monkeypatch.setattr(control_groups, "OWN", tmp_path / "own")
    monkeypatch.setattr(control_groups, "GROUPS", tmp_path)
    for name in ("SLURM_CPUS_ON_NODE", "NCPUS"):
        monkeypatch.delenv(name, raising=False)
    return make


def seen() -> str:
    return str(check_cores(Wanted()))


def test_a_node_that_its_group_leaves_a_part_of_a_core_is_unfit(groups):
    groups("0::/job/step\n", job__cpu_dot_max="15000 100000\n", job__step__cpu_dot_max="max 100000\n")
    assert quota_cores() == 0.15
    with pytest.raises(Unfit, match=r"leaves 0.15 of a core's time on \d+ cores"):
        seen()


@pytest.mark.parametrize(
    ("most", "given", "fit"), [("400000", "8", True), ("300000", "8", False), ("300000", "", True)]
)
def test_a_quota_of_less_than_half_of_what_was_given_is_unfit(groups, monkeypatch, most, given, fit):
    groups("4:cpu,cpuacct:/job\n1:name=systemd:/x\n0::/job\n")
    folder = control_groups.GROUPS / "cpu,cpuacct" / "job"
    folder.mkdir(parents=True)
    (folder / "cpu.cfs_quota_us").write_text(f"{most}\n")
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", given)
    if fit:
        assert f"the time of {int(most) / 100000:g}" in seen()
    else:
        with pytest.raises(Unfit, match="4 wanted at least"):
            seen()


def test_without_a_quota_or_with_files_that_say_nothing_a_node_is_fit(groups):
    groups("0::/job\n", job__cpu_dot_max="max 100000\n")
    assert quota_cores() is None and "cores" in seen()
    groups("0::/job\n", job__cpu_dot_max="\n", job__cpu_dot_stat="nr_periods\n")
    assert quota_cores() is None and throttled_periods() == Periods(0, 0)
    Path(control_groups.OWN).unlink()
    assert quota_cores() is None and "cores" in seen()


def test_time_slices_in_which_a_group_was_held_up_are_counted(groups):
    groups("0::/job\n", job__cpu_dot_stat="usage_usec 7\nnr_periods 40\nnr_throttled 30\n")
    assert throttled_periods() == Periods(40, 30)
    assert share_throttled(Periods(20, 20), Periods(40, 30)) == 0.5
    assert share_throttled(Periods(0, 0), Periods(0, 0)) == 0.0
