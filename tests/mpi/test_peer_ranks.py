"""Peers over real ranks (`programs/peer_cases.py`), and a ring that makes the same bits in both worlds."""

import json

import pytest

from mpitrain import Decentralized, EightBit, Uncompressed, simulate
from mpitrain.training.measure import same_model
from tests import toy
from tests.mpi.cases import assert_passed, case_names, launch


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("peers")


@pytest.fixture(scope="module")
def ranks(out):
    return launch(4, "peer_cases", env={"PEERS_OUT": str(out)})


@pytest.mark.parametrize("case", case_names("peer_cases"))
def test_case(ranks, case):
    assert_passed(ranks, case)


@pytest.mark.parametrize("codec", [Uncompressed(), EightBit()])
def test_a_ring_is_the_same_to_the_bit_in_both_worlds(out, ranks, tmp_path, codec):
    assert_passed(ranks, "case_a_ring_for_the_other_world")
    real = json.loads((out / f"twin-{codec.name}" / "result.json").read_text())
    virtual = simulate(
        toy.make_job(optimizer=toy.adam, batch_size=3), Decentralized("ring", codec=codec, resync=4), workers=4,
        run_dir=str(tmp_path), quiet=True,
    )  # fmt: skip
    assert same_model(out / f"twin-{codec.name}" / "model.safetensors", tmp_path / "model.safetensors")
    for key in ("digest", "samples", "messages", "sent_bytes", "drift", "drift_max", "averagings"):
        assert [one[key] for one in real["ranks"]] == [one[key] for one in virtual["ranks"]], key
