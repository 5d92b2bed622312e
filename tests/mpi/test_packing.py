"""Packing by real ranks: the same bytes as one, index and all, and one clear error when the source is wrong."""

import sys
from pathlib import Path

import numpy as np

from mpitrain.cli.main import main
from tests.ranks import run_ranks


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_four_ranks_write_what_one_writes_and_say_what_is_wrong_once(tmp_path):
    """One launch: a script that packs, packs again, and packs a source that is not there."""
    np.savez(
        tmp_path / "a.npz", x=np.arange(40_000, dtype=np.float32).reshape(10_000, 4), y=np.arange(10_000)
    )
    options = ["--shard-samples", "999", "--chunk-samples", "100", "--compression", "gzip"]
    words = ["data", "pack", str(tmp_path / "a.npz")]
    assert main([*words, str(tmp_path / "one"), *options]) == 0
    command = [sys.executable, "-m", "mpitrain", *words, str(tmp_path / "four"), *options]
    done = run_ranks(4, command).check()
    assert contents(tmp_path / "four") == contents(tmp_path / "one") and len(contents(tmp_path / "one")) == 13
    assert done.stdout.count("8000 samples in 9 shards") == 1 and done.stdout.count("packed") == 1
    wrong = run_ranks(2, [*command[:5], "gone.npz", str(tmp_path / "five")])
    assert wrong.code == 2 and wrong.stderr.count("gone.npz: no such file") == 1, wrong.stderr
    assert not (tmp_path / "five").exists()
