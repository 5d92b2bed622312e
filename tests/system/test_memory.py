"""What a process may still take, by each of the limits that there are."""

import math
import os
import resource
import subprocess
import sys

import pytest

from mpitrain.system import control_groups, memory


@pytest.fixture
def groups(tmp_path, monkeypatch):
    monkeypatch.setattr(control_groups, "GROUPS", tmp_path)
    monkeypatch.setattr(control_groups, "OWN", tmp_path / "own")
    return tmp_path


def test_limits_of_the_process_count_whole_and_the_machines_by_how_many_share_it(groups, monkeypatch):
    free = memory.available_bytes(1)
    assert 0 < free < math.inf and memory.available_bytes(4) == pytest.approx(free / 4, rel=0.2)
    monkeypatch.setattr(
        resource,
        "getrlimit",
        lambda limit: (
            (memory._kilobytes("/proc/self/status", "VmData", 0) * 1024 + 2**20, -1)
            if limit == resource.RLIMIT_DATA
            else (-1, -1)
        ),
    )
    assert memory.available_bytes(4) <= 2**21


@pytest.mark.parametrize(("kinds", "place", "limit", "used"), [
    ("", ".", "memory.max", "memory.current"),
    ("cpu,memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
])  # fmt: skip
def test_groups_of_both_versions_and_those_around_them(groups, kinds, place, limit, used):
    inner = groups / place / "job" / "task"
    inner.mkdir(parents=True)
    for folder, figures in ((inner, ("max", 50)), (inner.parent, (1000, 400))):
        (folder / limit).write_text(f"{figures[0]}\n")
        (folder / used).write_text(f"{figures[1]}\n")
    (groups / "own").write_text(f"3:cpuset:/x\n4:{kinds}:/job/task\n")
    assert list(memory.left_in_groups()) == [600]


PROGRAM = """
import torch
from mpitrain.system.memory import _kilobytes, give_large_blocks_back
assert give_large_blocks_back()
torch.empty(30 * 2**18).fill_(1)  # else glibc would take blocks of up to 30 MB from its heap from now on
begin = _kilobytes("/proc/self/status", "VmData", 0)
small = []
for _ in range(40):
    large = torch.empty(25 * 2**18)
    del large
    small.append(torch.empty(2**15))
print(_kilobytes("/proc/self/status", "VmData", 0) - begin)
"""


def test_small_blocks_do_not_keep_large_ones():
    told = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert float(told.stdout) < 10_000


FAULTS = """
import resource, sys
from mpitrain.system.memory import ask_torch_for_huge_pages
if "torch" in sys.argv:
    ask_torch_for_huge_pages()
import torch
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    torch.empty(2**24).fill_(1)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(
    memory.huge_pages() != "madvise", reason="the kernel gives huge pages to all, or to nobody"
)
def test_large_tensors_lie_in_huge_pages_where_that_is_asked_for():
    def num_faults(*words, **environ):
        command = [sys.executable, "-c", FAULTS, *words]
        told = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | environ)
        return int(told.stdout)

    plain = num_faults(GLIBC_TUNABLES="")
    assert plain > 4 * 2**26 / 4096
    assert num_faults(**memory.in_huge_pages({})) < plain / 4
    assert num_faults("torch", GLIBC_TUNABLES="") < plain / 4


def test_what_the_user_has_set_stays(monkeypatch):
    before = {"GLIBC_TUNABLES": "glibc.malloc.check=1"}
    assert memory.in_huge_pages(before) == {"GLIBC_TUNABLES": "glibc.malloc.check=1:glibc.malloc.hugetlb=1"}
    assert memory.in_huge_pages({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}) == {}
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    assert not memory.give_large_blocks_back()
