"""A sample of torch's own tests over mpi4py, and what the campaign makes of outcomes (`make test-torch` runs all)."""

import re

import pytest

from tests.torch_suite import table as tables

SAMPLE = [
    "test_Backend_enum_class",
    "test_all_gather",
    "test_all_gather_object_default_pg",
    "test_all_reduce_sum",
    "test_all_reduce_sum_async",
    "test_barrier",
    "test_broadcast",
    "test_DistributedDataParallelCPU",
    "test_accumulate_gradients_no_sync",
    "test_barrier_timeout_full_group",
    "test_monitored_barrier_gloo_subgroup",
    "test_gather",
    "test_isend",
    "test_scatter_object_list",
    "test_scatter",
    "test_send_recv_any_source",
]


def test_torchs_own_tests_pass():
    pytest.importorskip("expecttest", reason="torch's tests need expecttest")
    from tests.torch_suite.campaign import Launch

    launch = Launch("mpi4py:2", SAMPLE)
    assert launch.outcomes == dict.fromkeys(SAMPLE, tables.PASS), f"{launch.messages}\n{launch.result}"


LIST = """
# a comment
test_listed 2,3 gloo sorts what MPI does not
"""


@pytest.mark.parametrize(
    "ours, gloo, wrong",
    [
        ({"test_listed": "fail", "test_new": "pass"}, {"test_listed": "pass", "test_new": "pass"}, []),
        ({"test_listed": "fail", "test_new": "hang"}, {"test_new": "fail"}, []),
        (
            {"test_listed": "crash", "test_new": "hang"},
            {"test_new": "pass"},
            ["test_new on 2 ranks: gloo passes, mpi4py: hang"],
        ),
        (
            {"test_listed": "pass"},
            {"test_listed": "pass"},
            ["test_listed on 2 ranks passes now: take it off differences.txt"],
        ),
        ({"test_new": "pass"}, {}, []),
        (
            {"test_new": "pass"},
            {"test_new": "pass"},
            ["differences.txt has test_listed on 2 ranks, which is no test"],
        ),
    ],
)
def test_only_what_is_not_listed_is_wrong(ours, gloo, wrong):
    table = {"mpi4py:2": ours, "gloo:2": gloo}
    assert tables.judge(table, tables.read_differences(LIST)) == wrong


def test_a_table_is_read_as_it_was_written():
    table = {"gloo:2": {"test_a": "pass", "test_b": "skip"}, "mpi4py:2": {"test_a": "hang", "test_b": "pass"}}
    text = f"a head\n{tables.summary(table)}\n\n{tables.as_text(table)}\n"
    assert tables.from_text(text) == table
    assert "2 ranks: gloo passes 1, mpi4py 0 of them and 1 that gloo does not" in text


def test_a_line_without_a_reason_is_refused():
    with pytest.raises(ValueError, match="a reason"):
        tables.read_differences("test_listed 2,3")


def test_the_committed_table_has_no_difference_that_is_not_listed():
    from tests.torch_suite import campaign

    table = tables.from_text(campaign.RESULTS.read_text())
    assert set(table) == set(tables.COLUMNS)
    assert tables.judge(table, tables.read_differences(campaign.DIFFERENCES.read_text())) == []


def test_the_documentation_has_the_figures_of_the_table():
    from tests.torch_suite import campaign

    table = tables.from_text(campaign.RESULTS.read_text())
    passed, common, only_ours = re.findall(
        r"\d+", tables.summary(table).splitlines()[-1].replace("mpi4py", "")
    )
    page = " ".join((campaign.ROOT / "docs" / "own-scripts.md").read_text().split())
    assert (
        passed == common and f"of the {passed} runs" in page and f"and {only_ours} that gloo does not" in page
    )
