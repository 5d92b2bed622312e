"""What a run's time went to, as people read it: by the command, and on the page."""

import json

import pytest

from mpitrain.cli.main import main
from mpitrain.reporting.goodput import shares_if_disturbed
from mpitrain.reporting.pages.one_run import sentences_of
from mpitrain.reporting.run_files import read_runs
from mpitrain.system.time_spent import TimeSpent, goodput, read_spent


def leave(folder, *starts):
    """Starts of (accepted samples at its begin, steps of 8 samples and 1 s), each killed 3 s before the next began."""
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(json.dumps({"t": 0.0, "event": "start"}) + "\n")
    now = [0.0]
    for number, (samples, steps) in enumerate(starts):
        spent = TimeSpent(folder, str(number), samples, 0.0, lambda: now[0], lambda: now[0])
        spent.begin()
        for _ in range(steps):
            now[0] += 1.0
            spent.progress(samples := samples + 8)
        spent.write()
        now[0] += 3.0
    return folder


def test_the_command_and_the_page_tell_a_runs_parts_and_its_goodput(tmp_path, capsys):
    faulty, calm = leave(tmp_path / "faulty", (0, 6), (32, 11)), leave(tmp_path / "calm", (0, 15))
    main(["runs", "goodput", str(faulty), str(calm)])
    lines = capsys.readouterr().out.splitlines()
    assert [" ".join(line.split()) for line in lines] == [
        "useful 15.00 s 75.0%", "redone 2.00 s 10.0%", "restart 3.00 s 15.0%", "in all 20.00 s 100.0%",
        "120 useful samples, 16 done again: 6 useful samples a second",
        f"goodput 0.750 of the 8 a second of {calm}",
    ]  # fmt: skip
    said = list(sentences_of(*read_runs([faulty]), None))
    assert "The run's wall time, 20 s over all its starts: 75 % useful, 10 % redone, 15 % restart." in said
    assert shares_if_disturbed(goodput(read_spent(faulty))) == {
        "useful": 0.75,
        "redone": 0.1,
        "restart": 0.15,
    }
    assert shares_if_disturbed(goodput(read_spent(calm))) == {} == shares_if_disturbed({})


@pytest.mark.parametrize("place", ["nothing", "nowhere"])
def test_a_directory_that_holds_no_account_is_named(tmp_path, capsys, place):
    calm = leave(tmp_path / "calm", (0, 1))
    (tmp_path / "nothing").mkdir()
    for words in ([place], ["calm", place]):
        assert main(["runs", "goodput", *(str(tmp_path / word) for word in words)]) == 2
        assert f"{tmp_path / place} says nothing of the time" in capsys.readouterr().err
    leave(tmp_path / "idle", (0, 0), (0, 0))
    assert main(["runs", "goodput", str(calm), str(tmp_path / "idle")]) == 2
    assert "idle has made no samples" in capsys.readouterr().err
