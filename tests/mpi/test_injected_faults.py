"""`--inject` of faults on real ranks: the same names as in virtual time, and the same outcome."""

import json

from safetensors.torch import load_file

from mpitrain.checkpoint.parts import newest
from tests.ranks import run_ranks

DEADLINE_S = 180.0

# Where nobody waits for anybody, a victim that is slow to start would find all samples taken: the others wait for it.
PROGRAM = """
import os, time
import mpitrain as mt
from mpitrain.inject import Fault, read
from mpitrain.mpi.runtime import start
from mpitrain.values import parse
from tests import toy

runtime, orders, calls = start(), {orders!r}, []
runtime.exit_code = 0
due = {{one.worker + 1: one.at_step for one in read(orders) if isinstance(one, Fault)}}

def loss(model, batch):
    calls.append(1)
    if due.get(runtime.rank, -1) == len(calls) - 1:
        open(f"{path}/reached-{{runtime.rank}}", "w").close()
    while len(calls) == 4 and not all(
        os.path.exists(f"{path}/reached-{{rank}}") for rank in due if rank != runtime.rank
    ):
        time.sleep(0.01)
    return toy.square_loss(model, batch)

job = toy.make_job(
    epochs=10, batch_size=4, loss=loss, checkpoint_every="{every}", on_nonfinite="skip", keep_checkpoints=9,
    validate=toy.Memory(),
)
result = mt.train(job, parse("{strategy}", "strategy"), run_dir="{path}", quiet=True, inject=orders)
runtime.exit_code = result["exit_code"]
"""


def run(path, orders, ranks, every="never", strategy="async()", **options):
    script = PROGRAM.format(orders=orders, path=path, every=every, strategy=strategy)
    ended = run_ranks(ranks, script, timeout_s=DEADLINE_S, **options)
    told = path / "result.json"
    return ended, json.loads(told.read_text()) if told.exists() else None


def test_workers_that_break_in_every_way_are_survived_under_ulfm(tmp_path):
    ways = ("kill", "segv", "raise", "exit", "stop", "wedge")
    orders = [f"{how}(worker={worker},at_step={1 + worker % 2})" for worker, how in enumerate(ways)]
    ended, result = run(tmp_path, orders, 9, mpirun_args=("--with-ft", "ulfm"))
    assert result is not None and (result["status"], result["failure"]) == ("ok", ""), ended
    assert result["samples"] == 10 * 48 and result["inject"] == orders
    left, right = result["staleness_identity"]
    assert left == right
    lost = {int(rank): how for rank, how in result["lost"].items()}
    assert set(lost) >= set(range(1, 7))
    # on a machine that is busy enough, any of them may be given up before its death is known
    assert {lost[rank] for rank in (5, 6)} == {"silent"} and set(lost.values()) <= {"silent", "died"}


def test_a_validator_that_dies_when_all_is_pushed_is_followed_by_the_next_worker(tmp_path):
    ended, result = run(
        tmp_path, ["kill_at_end(worker=0)", "kill_at_end(worker=1)"], 6, strategy="sync(servers=2)",
        mpirun_args=("--with-ft", "ulfm"),
    )  # fmt: skip
    assert result is not None and (result["status"], result["failure"]) == ("ok", ""), ended
    assert result["samples"] == 10 * 48 and result["lost"] == {"2": "died", "3": "died"}
    assert result["metrics"]["validation_loss"] < 10 and load_file(result["model"]) and ended.code == 0


def test_faults_of_gradients_and_files_are_counted_and_the_run_goes_on(tmp_path):
    """A worker whose gradients are not finite ten times in a row is done without, and leaves in order."""
    orders = ["nan(worker=0,at_step=2)", "disk_full()", "corrupt_file(at_write=2)"]
    orders += [f"nan(worker=1,at_step={step})" for step in range(2, 12)]
    ended, result = run(tmp_path, orders, 3, every="96")
    ended.check()
    assert (result["status"], result["nonfinite"], result["lost"]) == ("ok", 11, {"2": "not finite"})
    cost = result["ranks"][0]["checkpoints"]
    assert cost["num_failed"] == 1 and cost["num_written"] >= 3
    assert "cannot write checkpoint part" in ended.stdout and not list(tmp_path.glob("checkpoints/*/.*.tmp"))
    folders = sorted((tmp_path / "checkpoints").iterdir())
    whole = [folder for folder in folders if (folder / "shard-0.json").exists()]
    assert len(whole) == cost["num_written"]
    for folder in whole[2:]:
        for file in folder.iterdir():
            file.unlink()
    found = newest(tmp_path)  # the third write, the second whole one, has a flipped bit
    assert found is not None and found.folder == whole[0] and "is damaged" in " ".join(found.refused)


def test_a_torn_payload_is_an_error_and_never_an_update(tmp_path):
    ended, result = run(tmp_path, ["torn(worker=0,at_step=2)"], 2)
    assert ended.code == 1 and result is None
    assert "payload of rank 1 is torn: stamps" in ended.stderr
