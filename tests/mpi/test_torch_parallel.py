"""DTensor, FSDP2, tensor parallelism, pipelines and checkpoints of torch, over mpi4py as over gloo
(`programs/torch_parallel.py`): a sample, and all of it under `make extended`."""

import pytest

from mpitrain.torch_versions import warm_up_fault
from tests.mpi.cases import assert_passed, case_names, launch

SAMPLE = ["case_dtensors_are_redistributed", "case_pipeline_schedules"]


def assert_all_passed(asked, **options):
    cases = [case for case in asked if case != "case_pipeline_schedules" or not warm_up_fault()]
    result = launch(4, "torch_parallel", cases, **options)
    for case in cases:
        assert_passed(result, case)
    result.check()
    if cases != asked:
        pytest.skip("passed, but for pipeline schedules: this torch's own end over gloo, too")


def test_a_sample_has_the_numbers_that_gloo_has():
    assert_all_passed(SAMPLE)


@pytest.mark.extended
@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_all_have_the_numbers_that_gloo_has(mpi):
    assert_all_passed(case_names("torch_parallel"), mpi=mpi)
