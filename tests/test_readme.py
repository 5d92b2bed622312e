"""The documentation does what it says: its diff is short and runs, its links lead somewhere, its commands run, and what
is generated is up to date.
"""

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests import documented
from tests.documented import PAGES, ROOT
from tests.ranks import run_plain, run_ranks
from tests.sampling import sampled
from tests.test_walls import FLOORS

README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = list(documented.commands())


def test_the_readme_is_short_and_narrow():
    lines = README.splitlines()
    assert len(lines) <= 150
    assert [line for line in lines if len(line) > 100 and "http" not in line] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_pages_are_wrapped(page):
    """Tables cannot be wrapped, nor can a command or a picture."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    assert [line for line in text.splitlines() if len(line) > 120 and line[:1] not in ("|", "!")] == []


def the_diff() -> list[str]:
    (diff,) = documented.blocks(ROOT / "README.md", "diff")
    return diff.splitlines()


def test_adoption_is_a_diff_of_at_most_eight_lines():
    changed = [line for line in the_diff() if line[:1] in "+-" and line[1:].strip()]
    assert 0 < len(changed) <= 8


@pytest.mark.parametrize("strategy", sampled(["mt.Async(servers=1)", "mt.AllReduce()"], ["mt.AllReduce()"]))
def test_the_diff_runs(tmp_path, strategy):
    after = "\n".join(line[1:] for line in the_diff() if not line.startswith("-")) + "\n"
    assert "mt.Async(servers=1)" in after
    run = run_ranks(3 if "Async" in strategy else 2, after.replace("mt.Async(servers=1)", strategy)).check()
    accuracies = re.findall(r"accuracy (0\.\d+)", run.stdout)
    assert len(accuracies) == 2
    assert len(set(accuracies)) == 1  # after finish() every worker holds the same model
    assert (
        float(accuracies[0]) >= 0.6
    )  # it trains (0.1 is chance); how far, asynchronously, hangs on who is held up


def test_before_the_diff_the_script_runs_alone(tmp_path, capsys):
    before = "\n".join(line[1:] for line in the_diff() if not line.startswith("+"))
    exec(compile(before, "before", "exec"), {})
    assert float(re.search(r"accuracy (0\.\d+)", capsys.readouterr().out).group(1)) >= 0.85


def test_the_lines_for_a_ddp_script_are_those_of_the_example():
    blocks = documented.blocks(ROOT / "docs" / "own-scripts.md", "")
    block = next(text for text in blocks if "init_process_group" in text)
    added = [line[1:] for line in block.splitlines() if line.startswith("+")]
    assert len(added) == 1
    example = (ROOT / "jobs" / "scripts" / "ddp.py").read_text()
    assert all(line.strip() in example for line in added)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(page):
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    assert links or page.name == "FORMAT.md"
    for link in links:
        path, _, heading = link.partition("#")
        target = page.parent / path if path else page
        assert link.startswith("https://") or target.exists(), link
        assert not heading or heading in anchors(target), link


def anchors(page: Path) -> list[str]:
    """What the headings of a page are linked by: small letters, digits, underscores and hyphens."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_file_and_test_it_names_exists(page):
    for name in re.findall(r"`((?:tests|mpitrain|jobs|benchmarks|docs|slurm)/[\w./-]+)`", page.read_text()):
        assert (ROOT / name).exists(), name


def test_the_picture_of_the_floors_is_that_of_the_walls():
    (picture,) = documented.blocks(ROOT / "README.md", "text")
    rows = [re.findall(r"(\w+)(?:/|\.py)(?= |$)", line) for line in picture.splitlines()]
    shown = [set(row) for row in rows if row]
    wanted = [set(floor) for floor in reversed(FLOORS) if not {"__init__", "__main__"} & set(floor)]
    assert shown == wanted


def test_what_is_generated_is_up_to_date():
    """Tables of values, lists of imports, and every figure that comes from `benchmarks/results`."""
    assert run_plain([sys.executable, str(ROOT / "docs" / "generate.py"), "--check"], cwd=ROOT) == ""


def test_every_strategy_and_damping_is_in_the_pages_and_in_the_help(capsys):
    import mpitrain.strategies  # noqa: F401 - registers them
    from mpitrain.cli.main import parse
    from mpitrain.values import names

    with pytest.raises(SystemExit):
        parse(["train", "--help"])
    told = capsys.readouterr().out
    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "strategies").glob("*.md"))
    for name in names("strategy"):
        assert f"`{name}`" in README or f"`{name}(" in README, name
    for name in names("strategy") + [name for name in names("damping") if name != "keep"]:
        assert f"`{name}(" in pages, name
        assert f"{name}(" in told, name


@pytest.mark.parametrize("command", [command for command, _ in COMMANDS], ids=str)
def test_commands_parse(command):
    """bash takes each line, and mpitrain's parser each of its own commands."""
    from mpitrain.cli.main import parse

    assert subprocess.run(["bash", "-n", "-c", command]).returncode == 0
    words = shlex.split(command)
    if (
        "mpitrain" in words
        and "..." not in words
        and not any(word.startswith("benchmarks/") for word in words)
    ):
        parse(words[words.index("mpitrain") + 1 :])
    for program in (word for word in words if word.startswith("benchmarks/") and "hosts.py" not in word):
        source = (ROOT / program).read_text()
        after = words[words.index(program) + 1 :]
        assert all(f'"{word}"' in source for word in after if word.startswith("--")), command


PYTHON = [(page, block) for page in PAGES for block in documented.blocks(page, "python")]


@pytest.mark.parametrize(
    ("page", "block"), PYTHON, ids=[f"{page.stem}{at}" for at, (page, _) in enumerate(PYTHON)]
)
def test_python_blocks_parse(page, block):
    ast.parse(block)


def test_the_python_of_the_page_on_data_runs_and_the_format_is_read_as_printed(tmp_path, monkeypatch):
    import torch

    import mpitrain as mt

    monkeypatch.chdir(tmp_path)
    write, _, unpacking, transform, own = documented.blocks(ROOT / "docs" / "data.md", "python")
    samples = torch.utils.data.TensorDataset(torch.zeros(30, 2))
    exec(compile(write, "data.md", "exec"), {"mt": mt, "dataset": samples})
    names: dict = {
        "torch": torch,
        "torchvision_transform": torch.relu,
        "cross_entropy": torch.nn.functional.cross_entropy,
    }
    exec(compile(unpacking, "data.md", "exec"), names)
    pairs = torch.utils.data.TensorDataset(torch.zeros(6, 2), torch.zeros(6, dtype=torch.int64))
    (batch,) = mt.Samples(pairs).batches(6)
    assert names["loss"](torch.nn.Linear(2, 3), batch).shape == ()
    exec(compile(transform, "data.md", "exec"), names)
    images = mt.Transformed([{"x": torch.zeros(3, 32, 32)}] * 4, names["augment"])
    assert next(iter(images.batches(4)))["x"].std() > 0
    (read,) = documented.blocks(ROOT / "mpitrain" / "data" / "FORMAT.md", "python")
    read = read.replace("[3]", "[1]")  # that pack has two samples
    found: dict = {}
    exec(compile(read, "FORMAT.md", "exec"), found)
    assert found["text"] == "three" and list(found["y"])[:2] == [1, 3]
    (tmp_path / "own").mkdir()
    monkeypatch.chdir(tmp_path / "own")
    mt.pack(({"x": torch.zeros(3), "y": torch.tensor(1)} for _ in range(16)), "data/mine")
    told = {"mt": mt, "torch": torch, "augment": lambda batch, random: {**batch, "x": batch["x"] + 1}}
    exec(compile(own, "data.md", "exec"), told)
    assert [len(next(iter(told[name]))["x"]) for name in ("samples", "batches", "augmented")] == [8, 8, 8]
    assert len(next(iter(told["pairs"]))) == 2 and next(iter(told["augmented"]))["x"].min() == 1
