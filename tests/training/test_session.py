"""What the handshake compares, and how a finished run is judged."""

import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from mpitrain.errors import EXIT_ERROR, EXIT_OK, EXIT_REQUEUE, EXIT_TARGET_MISSED, UsageError
from mpitrain.job import Overrides
from mpitrain.mpi.faults.level import why_no_heartbeat, why_not_asked_level
from mpitrain.strategies import AllReduce, Async, Decentralized, LocalSGD, Sync
from mpitrain.strategies.placement import Roles
from mpitrain.system.files.run_directory import Identity
from mpitrain.training.fault_tolerance import level, warning
from mpitrain.training.outcome import RunOutcome
from mpitrain.training.resuming.fingerprint import fingerprint
from mpitrain.training.session import result_of
from mpitrain.training.validate import validate_run
from tests import toy


def test_functions_are_told_apart_by_their_code_and_constants():
    same = [lambda p: torch.optim.SGD(p, lr=0.1) for _ in range(2)]
    assert fingerprint(same[0]) == fingerprint(same[1])
    assert fingerprint(same[0]) != fingerprint(lambda p: torch.optim.SGD(p, lr=0.2))
    assert fingerprint(same[0]) != fingerprint(lambda p: torch.optim.Adam(p, lr=0.1))
    assert fingerprint(partial(torch.optim.SGD, lr=0.1)) != fingerprint(partial(torch.optim.SGD, lr=0.2))
    assert fingerprint(toy.Memory()) != fingerprint(toy.Memory(num_samples=3))
    assert "0x" not in fingerprint(object())  # an address differs between ranks and means nothing


def judged(metrics, failure="", target=None, **more):
    job = toy.make_job(
        validate=toy.Memory(), target=target or {}, strategy=AllReduce(), metrics=lambda model, batch: metrics
    )
    session = SimpleNamespace(
        job=job, strategy=AllReduce(), roles=Roles((), (0, 1)), started_s=0.0, run_dir="r",
        resume=None, identity=Identity("run", "start"), about_data={},
        overrides=Overrides(), leg=1, runtime=SimpleNamespace(num_nodes=1, fault_tolerance="none", num_threads=None),
    )  # fmt: skip
    result = {"metrics": metrics, "samples": 1, "model": "m", "steps": 1}
    outcomes = [RunOutcome({}, result=result, **more), RunOutcome({}, failure)]
    return result_of(session, outcomes)


def test_a_run_is_judged_by_its_failures_first_and_its_target_next():
    assert judged({"accuracy": 0.98}, target={"accuracy": 0.97})["exit_code"] == EXIT_OK
    missed = judged({"accuracy": 0.96}, target={"accuracy": 0.97})
    assert missed["exit_code"] == EXIT_TARGET_MISSED and missed["status"] == "missed"
    assert "accuracy 0.96 is below 0.97" in missed["failure"]
    for metrics in ({"accuracy": float("nan")}, {}):  # NaN and never measured both miss
        assert judged(metrics, target={"accuracy": 0.97})["exit_code"] == EXIT_TARGET_MISSED
    failed = judged({"accuracy": 0.5}, failure="rank 1: boom", target={"accuracy": 0.97})
    assert failed["exit_code"] == EXIT_ERROR and failed["failure"].startswith("rank 1: boom")


def test_a_run_that_was_told_to_end_and_could_not_write_its_checkpoint_has_failed():
    assert judged({}, requeue=True, unwritten="")["exit_code"] == EXIT_REQUEUE
    full = judged({}, requeue=True, unwritten="cannot write: no space")
    assert (full["exit_code"], full["failure"]) == (EXIT_ERROR, "cannot write: no space")
    assert judged({}, unwritten="cannot write: no space")["exit_code"] == EXIT_OK  # it came to its end


def test_a_simulation_starts_no_mpi():
    """Under a launcher a process that has started MPI and not ended it makes the job fail."""
    import subprocess
    import sys

    code = "import sys, mpitrain.simulation.servers; sys.exit('mpi4py.MPI' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


@pytest.mark.parametrize(
    ("launched", "strategy", "named"),
    [
        ("ulfm", Async(), "ulfm"),
        ("ulfm", AllReduce(), "ulfm"),
        ("ulfm", LocalSGD(), "ulfm"),
        ("ulfm", Decentralized(), "restart"),
        ("heartbeat", Async(), "heartbeat"),
        ("heartbeat", AllReduce(), "restart"),
        ("none", Async(), "restart"),
        ("none", AllReduce(), "restart"),
    ],
)
def test_a_run_says_what_a_workers_death_costs_it(launched, strategy, named):
    """Where ranks hold what no other has, a launch that tolerates failures changes nothing."""
    runtime = SimpleNamespace(fault_tolerance=launched)
    assert level(runtime, strategy) == named
    hangs = launched == "heartbeat" and named == "restart"
    assert ("only --watchdog-s ends such a run" in warning(runtime, strategy)) == hangs


@pytest.mark.parametrize(
    ("library", "environ", "told"),
    [
        ("MPICH Version: 5.0.2", {"SLURM_PROCID": "0"}, ""),
        ("Intel(R) MPI Library 2021.19", {"SLURM_PROCID": "0"}, ""),
        (
            "Open MPI v5.0.11",
            {"SLURM_PROCID": "0"},
            "this is Open MPI v5.0.11, which under srun is `restart`",
        ),
        ("MPICH Version: 5.0.2", {}, "needs srun"),
        ("MPICH Version: 5.0.2", {"SLURM_PROCID": "0", "HYDI_CONTROL_FD": "7"}, "needs srun"),
    ],
)
def test_heartbeat_is_had_under_srun_with_mpich_only(library, environ, told):
    why_not = why_no_heartbeat(library, environ)
    assert told in why_not and bool(told) == bool(why_not)


@pytest.mark.parametrize(
    ("library", "has_ulfm", "environ", "told"),
    [
        ("Open MPI v5.0.11", True, {"OMPI_MCA_mpi_ft_enable": "1"}, ""),
        ("Open MPI v5.0.11", True, {}, "mpirun --with-ft ulfm"),
        ("Open MPI v4.1.4", False, {}, "this is Open MPI v4.1.4"),
        ("CRAY MPICH version 8.1", False, {}, "`restart`.*Cray MPICH, Intel MPI.*`heartbeat`"),
        ("Intel(R) MPI Library 2021.19", False, {}, "`restart`.*Cray MPICH, Intel MPI.*`heartbeat`"),
    ],
)
def test_ulfm_is_had_where_mpi_and_launch_have_it_and_the_way_out_is_named(library, has_ulfm, environ, told):
    why_not = why_not_asked_level(library, has_ulfm, {**environ, "MPITRAIN_FT": "ulfm"})
    assert re.search(told, why_not) and bool(told) == bool(why_not) and "pip install" not in why_not
    assert why_not_asked_level(library, has_ulfm, environ) == ""


def test_the_heartbeat_option_is_for_servers_and_is_a_time():
    validate_run(toy.make_job(strategy=Sync()), Overrides(heartbeat_s=5.0), 2)
    with pytest.raises(UsageError, match="--heartbeat-s .* has no servers"):
        validate_run(toy.make_job(strategy=AllReduce()), Overrides(heartbeat_s=5.0), 2)
    for wrong in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(UsageError, match="--heartbeat-s must be finite and greater than 0"):
            Overrides(heartbeat_s=wrong).check()
