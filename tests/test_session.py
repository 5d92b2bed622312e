"""What the handshake compares, and how a finished run is judged."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from mpitrain.errors import EXIT_ERROR, EXIT_OK, EXIT_TARGET_MISSED
from mpitrain.rules import AllReduce, Async, Decentralized, LocalSGD, Roles
from mpitrain.training.levels import level
from mpitrain.training.options import fingerprint
from mpitrain.training.session import judge
from tests import toy


def test_functions_are_told_apart_by_their_code_and_constants():
    same = [lambda p: torch.optim.SGD(p, lr=0.1) for _ in range(2)]
    assert fingerprint(same[0]) == fingerprint(same[1])
    assert fingerprint(same[0]) != fingerprint(lambda p: torch.optim.SGD(p, lr=0.2))
    assert fingerprint(same[0]) != fingerprint(lambda p: torch.optim.Adam(p, lr=0.1))
    assert fingerprint(partial(torch.optim.SGD, lr=0.1)) != fingerprint(partial(torch.optim.SGD, lr=0.2))
    assert fingerprint(toy.Memory()) != fingerprint(toy.Memory(num_samples=3))
    assert "0x" not in fingerprint(object())  # an address differs between ranks and means nothing


def judged(metrics, failure="", target=None):
    job = toy.make_job(validate=toy.Memory(), target=target or {}, strategy=AllReduce())
    session = SimpleNamespace(
        job=job, strategy=AllReduce(), roles=Roles((), (0, 1)), started_s=0.0, run_dir="r", resume=None,
        overrides=SimpleNamespace(injections=()), runtime=SimpleNamespace(num_nodes=1, fault_tolerance="none"),
    )  # fmt: skip
    outcomes = [
        {"detail": {}, "result": {"metrics": metrics, "samples": 1, "model": "m", "steps": 1}, "failure": ""},
        {"detail": {}, "failure": failure},
    ]
    return judge(session, outcomes)


def test_a_run_is_judged_by_its_failures_first_and_its_target_next():
    assert judged({"accuracy": 0.98}, target={"accuracy": 0.97})["exit_code"] == EXIT_OK
    missed = judged({"accuracy": 0.96}, target={"accuracy": 0.97})
    assert missed["exit_code"] == EXIT_TARGET_MISSED and missed["status"] == "fail"
    assert "accuracy 0.96 is below 0.97" in missed["failure"]
    for metrics in ({"accuracy": float("nan")}, {}):  # NaN and never measured both miss
        assert judged(metrics, target={"accuracy": 0.97})["exit_code"] == EXIT_TARGET_MISSED
    failed = judged({"accuracy": 0.5}, failure="rank 1: boom", target={"accuracy": 0.97})
    assert failed["exit_code"] == EXIT_ERROR and failed["failure"].startswith("rank 1: boom")


def test_a_rehearsal_starts_no_mpi():
    """Under a launcher a process that has started MPI and not ended it makes the job fail."""
    import subprocess
    import sys

    code = "import sys, mpitrain.simulation; sys.exit('mpi4py.MPI' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


@pytest.mark.parametrize(
    ("launched", "strategy", "named"),
    [
        ("ulfm", Async(), "ulfm"),
        ("ulfm", AllReduce(), "ulfm"),
        ("ulfm", LocalSGD(), "ulfm"),
        ("ulfm", Decentralized(), "restart"),
        ("none", Async(), "restart"),
        ("none", AllReduce(), "restart"),
    ],
)
def test_a_run_says_what_a_workers_death_costs_it(launched, strategy, named):
    """Where ranks hold what no other has, a launch that tolerates failures changes nothing."""
    assert level(SimpleNamespace(fault_tolerance=launched), strategy) == named
