"""Tables on servers over real ranks (`programs/table_cases.py`, `table_faults.py`)."""

import json

import pytest

import mpitrain as mt
from mpitrain.training.measure import same_model
from tests import sparse_jobs
from tests.mpi.cases import assert_passed, case_names, launch, launch_program

KINDS = list(enumerate(sparse_jobs.KINDS[::3]))


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("tables")


@pytest.fixture(scope="module")
def ranks(out):
    return launch(5, "table_cases", env={"TABLES_OUT": str(out)})


@pytest.mark.parametrize("case", case_names("table_cases"))
def test_case(ranks, case):
    assert_passed(ranks, case)


@pytest.mark.parametrize(("number", "kind"), KINDS, ids=[f"{number}" for number, _ in KINDS])
def test_a_simulation_makes_the_same_bits(ranks, out, tmp_path, number, kind):
    layer, words, optimizer = kind
    job = sparse_jobs.make_job(layer=layer, words=words, optimizer=optimizer)
    mt.simulate(job, mt.Sync(servers=2), workers=3, run_dir=str(tmp_path), quiet=True)
    assert same_model(out / f"{number}-True" / "model.safetensors", tmp_path / "model.safetensors")


def faulty(path, strategy, orders, ranks, **more):
    asked = {"path": str(path), "strategy": strategy, "orders": orders, **more}
    path.mkdir()
    return launch_program(
        ranks, "table_faults", json.dumps(asked), timeout_s=180, mpirun_args=("--with-ft", "ulfm")
    )


def test_after_the_death_of_workers_every_gradient_has_been_applied_to_every_row_once(tmp_path):
    faulty(tmp_path / "whole", "async(servers=2)", [], 5).check()
    orders = ["kill(worker=1,at_step=1)", "kill(worker=2,at_step=2)"]
    ended = faulty(tmp_path / "killed", "async(servers=2)", orders, 5)
    result = json.loads((tmp_path / "killed" / "result.json").read_text())
    assert (result["status"], sorted(result["lost"])) == ("ok", ["3", "4"]), ended
    assert same_model(*(tmp_path / name / "model.safetensors" for name in ("whole", "killed")))


def test_the_death_of_a_worker_ends_an_allreduce_beside_servers(tmp_path):
    """Also where MPI would let the others go on; nobody waits for the dead one."""
    path = tmp_path / "killed"
    ended = faulty(path, "hybrid(servers=2,tables='servers')", ["kill(worker=1,at_step=2)"], 5)
    assert ended.code != 0 and "rank 3" in ended.stderr + ended.stdout, ended


def test_an_id_that_is_no_row_is_refused_by_rank_step_and_place(tmp_path):
    ended = faulty(tmp_path / "bad", "sync(servers=2)", [], 4, bad=3)
    said = ended.stderr + ended.stdout
    assert "rank 3 (worker, step 1)" in said, ended
    assert "table 'table' has rows 0 to 84, and the batch asks for id 85, sample 1, field 3" in said, ended
