"""Peers over real ranks (`programs/peer_cases.py`), and a ring of five that makes the same bits in both worlds."""

import json

import pytest

from mpitrain import Decentralized, EightBit, simulate
from mpitrain.training.measure import same_model
from tests import toy
from tests.mpi.cases import assert_passed, case_names, launch
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return launch(4, "peer_cases", env={"PEERS_OUT": str(tmp_path_factory.mktemp("peers"))}, timeout_s=120)


@pytest.mark.parametrize("case", case_names("peer_cases"))
def test_case(ranks, case):
    assert_passed(ranks, case)


RING = """
import mpitrain as mt
from tests import toy

for name, codec in (("none", mt.Uncompressed()), ("eightbit", mt.EightBit())):
    rule = mt.Decentralized("ring", codec=codec, resync=4)
    mt.train(toy.make_job(optimizer=toy.adam, batch_size=3), rule, run_dir=f"{path}/{{name}}", quiet=True)
"""


def test_a_ring_of_five_is_the_same_to_the_bit_in_both_worlds(tmp_path):
    run_ranks(5, RING.format(path=tmp_path)).check()
    for name, codec in (("none", {}), ("eightbit", {"codec": EightBit()})):
        real = json.loads((tmp_path / name / "result.json").read_text())
        virtual = simulate(
            toy.make_job(optimizer=toy.adam, batch_size=3), Decentralized("ring", resync=4, **codec), workers=5,
            run_dir=str(tmp_path / f"virtual-{name}"), quiet=True,
        )  # fmt: skip
        assert same_model(
            tmp_path / name / "model.safetensors", tmp_path / f"virtual-{name}" / "model.safetensors"
        )
        for key in ("digest", "samples", "messages", "sent_bytes", "drift", "drift_max", "meetings"):
            assert [one[key] for one in real["ranks"]] == [one[key] for one in virtual["ranks"]], key
